"""A rank of MPI that steps mnist-cnn and prints when its operations and its sums began and ended."""

from __future__ import annotations

import json
import sys
import time

from cubatch.engine.data_parallel import DataParallel
from cubatch.engine.exchange import MpiExchange
from cubatch.hardware import probe
from cubatch.network import models

STEPS = 5


class Trace:
    """Notes when each operation began and ended."""

    def __init__(self, ops):
        self._ops, self.seen = ops, []

    def run(self, rank, number, work):
        """Do the operation, as rank 0 of its team sees it."""
        begin = time.perf_counter()
        work()
        if rank == 0:
            self.seen.append([self._ops[number].kind, begin, time.perf_counter()])

    def wait(self, rank, meet):
        """Wait."""
        meet()


if __name__ == "__main__":
    exchange, steps = MpiExchange(), []
    with DataParallel(
        models.build("mnist-cnn"), exchange=exchange, device=probe.device("cpu"), dtype="float32"
    ) as model:
        model.prepare(64)
        model.load_random()
        for _ in range(STEPS):
            exchange.exchanged()
            trace = Trace(model.plan.schedule.ops)
            model.step(trace)
            found = exchange.exchanged()
            spans = [[span.begin, span.end, span.bytes] for span in found.spans]
            steps.append({"operations": trace.seen, "sums": spans, "exposed": found.exposed_seconds})
    if exchange.rank == 0:
        sys.stdout.write(json.dumps(steps) + "\n")
