"""The queue of a server with dynamic batching, compared with SimPy and with closed forms."""

from __future__ import annotations

import math

import numpy as np
import pytest
import simpy

from cubatch.serving.batching_queue import simulate


def requests_of(arrivals, env, queue):
    """Put the number and time of each arrival into the queue, at that time."""
    for number, arrival in enumerate(arrivals):
        yield env.timeout(arrival - env.now)
        queue.put((number, arrival))


def served_by_simpy(arrivals, steps, instances, delay):
    """Return the latency of each request: instances take turns at gathering a batch from one store."""
    env = simpy.Environment()
    queue, gathering, latencies = simpy.Store(env), simpy.Resource(env, 1), {}

    def instance():
        while True:
            with gathering.request() as turn:
                yield turn
                batch = [(yield queue.get())]
                deadline = env.timeout(max(0.0, batch[0][1] + delay - env.now))
                while len(batch) < len(steps):
                    request = queue.get()
                    yield request | deadline
                    if not request.triggered:
                        request.cancel()
                        break
                    batch.append(request.value)
            yield env.timeout(steps[len(batch) - 1])
            latencies.update((number, env.now - arrival) for number, arrival in batch)

    env.process(requests_of(arrivals, env, queue))
    for _ in range(instances):
        env.process(instance())
    env.run()
    return [latencies[number] for number in range(len(arrivals))]


def served_by_simpy_ahead(arrivals, steps, delay):
    """Return the latency of each request of one instance, whose batches are closed by a process of their own."""
    env = simpy.Environment()
    queue, closed, latencies = simpy.Store(env), simpy.Store(env), {}

    def gather():
        while True:
            batch = [(yield queue.get())]
            deadline = env.timeout(delay)
            while len(batch) < len(steps):
                request = queue.get()
                yield request | deadline
                if not request.triggered:
                    request.cancel()
                    break
                batch.append(request.value)
            closed.put(batch)

    def instance():
        while True:
            batch = yield closed.get()
            yield env.timeout(steps[len(batch) - 1])
            latencies.update((number, env.now - arrival) for number, arrival in batch)

    for process in (requests_of(arrivals, env, queue), gather(), instance()):
        env.process(process)
    env.run()
    return [latencies[number] for number in range(len(arrivals))]


def arrivals_of(rate, count, seed=0):
    """Return the times of a Poisson process."""
    return list(np.cumsum(np.random.default_rng(seed).exponential(1 / rate, size=count)))


@pytest.mark.parametrize("delay", [0.0, 0.004])
@pytest.mark.parametrize(("instances", "rate"), [(1, 300.0), (1, 900.0), (3, 2000.0)])
def test_latencies_are_those_of_simpy(instances, rate, delay):
    """Each percentile is that of the same rule written as processes of SimPy, for one and for several instances."""
    arrivals, steps = arrivals_of(rate, 3000), [0.003 + 0.0005 * n for n in range(1, 9)]
    load = simulate(arrivals, [[seconds] for seconds in steps], instances=instances, delay=delay, overhead=0.001)
    settled = np.array(served_by_simpy(arrivals, steps, instances, delay))[300:] + 0.001
    expected = np.percentile(settled, (50, 95, 99))
    assert (load.p50, load.p95, load.p99) == pytest.approx(tuple(expected), rel=1e-9)
    stretches = [np.percentile(stretch, 99) for stretch in np.array_split(settled, 10)]
    assert load.worst_p99 == pytest.approx(max(stretches), rel=1e-9)


def test_one_server_with_exponential_steps_has_the_latency_of_queueing_theory():
    """
    In an M/M/1 queue the latency is exponential with the rate mu - lambda, and the server is busy lambda / mu.

    At half load successive latencies are correlated over about ten requests, so that 200 000 hold 200 independent ones
    above the 99th percentile.  Their share of 1 % then has a standard error of 7 %, the percentile one of 1.5 %.
    """
    times = list(np.random.default_rng(1).exponential(0.01, size=199_999))
    load = simulate(arrivals_of(50.0, 200_000), [times])
    assert load.p99 == pytest.approx(math.log(100) / (100 - 50), rel=4 * 0.015)
    assert load.p50 == pytest.approx(math.log(2) / (100 - 50), rel=0.02)
    assert load.utilization == pytest.approx(0.5, rel=0.02)


def test_utilization_is_a_share_of_all_instances():
    """Four instances that serve what one could have done half of the time are busy an eighth of it."""
    load = simulate(arrivals_of(50.0, 20_000), [[0.01]], instances=4)
    assert load.utilization == pytest.approx(0.125, rel=0.03)  # 20 000 arrivals scatter by 0.7 %


def test_a_full_batch_does_not_wait():
    """The second of two requests fills the batch, long before the delay of the first is over."""
    load = simulate([0.0, 0.25], [[1.0], [1.0]], delay=10.0)
    assert load.mean_batch_size == 2
    assert load.p99 == pytest.approx(1.25, abs=0.01)  # of 1.25 and 1.0


@pytest.mark.parametrize("delay", [0.002, 0.008])
@pytest.mark.parametrize("rate", [100.0, 600.0])
def test_batches_that_are_closed_while_the_instance_is_busy_are_those_of_simpy(rate, delay):
    """Closed batches wait in a second queue, and take no further requests."""
    arrivals, steps = arrivals_of(rate, 3000), [0.003 + 0.0005 * n for n in range(1, 9)]
    load = simulate(arrivals, [[seconds] for seconds in steps], delay=delay, closes_while_busy=True)
    expected = np.percentile(served_by_simpy_ahead(arrivals, steps, delay)[300:], (50, 95, 99))
    assert (load.p50, load.p95, load.p99) == pytest.approx(tuple(expected), rel=1e-9)


def test_without_a_delay_closed_batches_are_single_requests():
    """The capacity is then that of single steps: at 300/s it is exceeded, though batches of 8 would take 1142/s."""
    steps = [[0.003 + 0.0005 * n] for n in range(1, 9)]
    arrivals = arrivals_of(300.0, 3000)
    ahead, idle = (simulate(arrivals, steps, closes_while_busy=each) for each in (True, False))
    assert ahead.mean_batch_size == 1.0
    assert ahead.p99 > 10 * idle.p99
