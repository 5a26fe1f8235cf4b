"""The callback for Lightning, in Lightning's own trainer on the CPU: what it sets, and that nothing else is changed."""

from __future__ import annotations

import json
import logging
import warnings

import pytest

torch = pytest.importorskip("torch")  # first: a module that was skipped before is there in part only
from tests.parity.beside_torchvision import registering_nothing  # noqa: E402

with registering_nothing():  # its metrics import torchvision where that is installed
    pytest.importorskip("lightning", reason="Lightning is not installed: pip install '.[lightning]'")

from cubatch.errors import InvalidArgument  # noqa: E402
from cubatch.tuning.results import TuningResult  # noqa: E402
from tests.unit.tuned import measurement, tuned  # noqa: E402

with warnings.catch_warnings():  # Lightning's dependencies warn of each other
    warnings.simplefilter("ignore")
    import lightning.pytorch as pl
    from lightning.pytorch.callbacks import BatchSizeFinder, Callback
    from lightning.pytorch.utilities.exceptions import MisconfigurationException
    from torchmetrics import Accuracy

    from cubatch.integrations.lightning import CubatchBatchSizeFinder

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning"),  # of few workers, of few batches
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]
SHORT = {"budget": 10.0, "memory_limit": "1GiB"}
NUM_SAMPLES = 48


class Counter(pl.LightningModule):
    """A small classifier that logs, collects its outputs, and notes the sizes of the batches it was given."""

    def __init__(self):
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 1), torch.nn.BatchNorm2d(4), torch.nn.Flatten(),
                                       torch.nn.Dropout(0.5), torch.nn.Linear(16, 3))  # fmt: skip
        self.outputs, self.seen_by_fit, self.total = [], [], torch.zeros(())

    def _loss(self, batch):
        x, y = batch
        loss = torch.nn.functional.cross_entropy(self.net(x), y)
        self.outputs.append(loss.detach())
        self.total += 1
        return loss

    def training_step(self, batch, batch_idx):
        loss = self._loss(batch)
        self.log("train_loss", loss)
        return {"loss": loss}

    def validation_step(self, batch, batch_idx):
        self.log_dict({"loss": self._loss(batch)})

    def test_step(self, batch, batch_idx):
        self._loss(batch)

    def predict_step(self, batch):
        return self.net(batch[0])

    def on_train_start(self):
        self.at_start = {name: value.clone() for name, value in self.state_dict().items()}
        self.outputs_at_start, self.total_at_start = list(self.outputs), self.total.clone()

    def on_train_batch_start(self, batch, batch_idx):
        self.seen_by_fit.append(len(batch[0]))

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.1)


class Data(pl.LightningDataModule):
    """Random images, with a batch size of its own."""

    def __init__(self):
        super().__init__()
        self.batch_size = 2

    def _loader(self):
        generator = torch.Generator().manual_seed(0)
        x, y = torch.randn(NUM_SAMPLES, 3, 2, 2, generator=generator), torch.arange(NUM_SAMPLES) % 3
        return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=self.batch_size)

    train_dataloader = val_dataloader = test_dataloader = predict_dataloader = _loader


def trainer(tmp_path, *callbacks, **more):
    """One epoch on the CPU, silent."""
    return pl.Trainer(accelerator="cpu", max_epochs=1, logger=False, enable_checkpointing=False, devices=1,
                      enable_progress_bar=False, enable_model_summary=False, default_root_dir=tmp_path,
                      callbacks=list(callbacks), **more)  # fmt: skip


def test_fit_trains_with_the_size_found_and_from_the_state_before(tmp_path):
    """The data module's size is the answer, the first batch has it, and weights, statistics, lists are untouched."""
    torch.manual_seed(0)
    model, data, finder = Counter(), Data(), CubatchBatchSizeFinder(**SHORT)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    random = torch.get_rng_state()

    trainer(tmp_path, finder, limit_val_batches=0).fit(model, datamodule=data)

    size = finder.optimal_batch_size
    assert finder.result.batch_size == size == data.batch_size
    assert finder.result.mode == "training"
    assert size <= finder.result.largest_measured <= NUM_SAMPLES
    assert model.seen_by_fit == [min(size, NUM_SAMPLES - begun) for begun in range(0, NUM_SAMPLES, size)]
    assert all(torch.equal(model.at_start[name], value) for name, value in before.items())
    assert model.outputs_at_start == []
    assert model.total_at_start == 0
    assert "log" not in vars(model)
    assert not list(tmp_path.iterdir())
    torch.set_rng_state(random)
    alone = Counter()
    alone.load_state_dict(before)
    data.batch_size = size
    torch.set_rng_state(random)
    trainer(tmp_path, limit_val_batches=0).fit(alone, datamodule=data)
    for name, value in model.state_dict().items():  # as if it had been asked for this size from the start
        assert torch.equal(alone.state_dict()[name], value), name


def test_fit_times_the_accumulation_of_the_trainer(tmp_path):
    """The timed step has the trainer's eight batches to an optimizer step; the trainer is no state of the module."""
    finder = CubatchBatchSizeFinder(**SHORT)
    trainer(tmp_path, finder, limit_val_batches=0, accumulate_grad_batches=8).fit(Counter(), datamodule=Data())
    assert finder.result.accumulate == 8
    assert not any("cannot be restored" in reason for reason in finder.result.reasons)


def test_a_target_is_kept_by_accumulation(tmp_path):
    """Batch size times accumulated batches is the target; the timed step has the batches that it has at the start."""
    data, target = Data(), 8
    options = {"budget": 120.0, "max_batch_size": target, "memory_limit": "1GiB"}
    began, finder = data.batch_size, CubatchBatchSizeFinder(target_batch_size=target, **options)
    loop = trainer(tmp_path, finder, limit_val_batches=0)
    loop.fit(Counter(), datamodule=data)
    assert finder.result.accumulate == target // began
    assert data.batch_size * loop.accumulate_grad_batches == target


def all_ran(finder):
    return {m.status for m in finder.result.measurements} <= {"ok", "dropped", "not_run"}


def measured_sizes(finder):
    return {m.batch_size for m in finder.result.measurements if m.status == "ok"}


def result_of(**found):
    """A result of these measurements, as if the module had been tuned."""
    return TuningResult.from_json(json.dumps(tuned(**found, fastest_batch_size=found["batch_size"], tied_with=[])))


def test_a_size_that_was_compared_with_none_takes_no_place_of_the_users(tmp_path, monkeypatch):
    """Lightning goes on with the size that the data module had, and it is told why."""
    one = result_of(
        measurements=[measurement(1, 0.01), measurement(8, None, "not_run")], batch_size=None, decided_by="budget",
        reasons=["There is no recommendation: raise budget."],
    )  # fmt: skip
    monkeypatch.setattr(CubatchBatchSizeFinder, "_tuned", lambda *_: one)
    model, data, finder = Counter(), Data(), CubatchBatchSizeFinder(**SHORT)
    finder.optimal_batch_size = 4  # of an earlier stage
    with pytest.warns(UserWarning, match=r"no recommendation: raise budget\. batch_size stays as it is"):
        trainer(tmp_path, finder, limit_val_batches=0).fit(model, datamodule=data)
    assert (data.batch_size, finder.optimal_batch_size, set(model.seen_by_fit)) == (2, None, {2})


@pytest.fixture
def recommends_eight(monkeypatch):
    """Let every search of the finder recommend 8, after 1 and 8 took equally long."""
    result = result_of(
        mode="training", measurements=[measurement(1, 0.01), measurement(8, 0.01)], batch_size=8, decided_by="plateau",
        reasons=["Use batch size 8."],
    )  # fmt: skip
    monkeypatch.setattr(CubatchBatchSizeFinder, "_tuned", lambda *_: result)


def test_the_log_names_the_size_that_a_target_is_divided_into(recommends_eight, tmp_path, monkeypatch):
    """Of a target of 12 after 8 was recommended: 6, the largest divisor, twice; 8 is not named."""
    logged = []
    monkeypatch.setattr("lightning.pytorch.utilities.rank_zero.rank_zero_info", logged.append)
    data, loop = Data(), trainer(tmp_path, CubatchBatchSizeFinder(target_batch_size=12, **SHORT), limit_val_batches=0)
    loop.fit(Counter(), datamodule=data)
    assert (data.batch_size, loop.accumulate_grad_batches) == (6, 2)
    (line,) = (each for each in logged if "size" in each)
    assert "Of the sizes that divide 12, up to the largest measured, 8, 6 " in line


def test_a_target_that_is_divided_badly_is_warned_of(recommends_eight, tmp_path):
    """11 is a prime above the 8 that was measured: batches of 1 have an eighth of the throughput."""
    loop = trainer(tmp_path, CubatchBatchSizeFinder(target_batch_size=11, **SHORT), limit_val_batches=0)
    with pytest.warns(UserWarning, match=r"at 12.5 % of the throughput of batch size 8.*not measured: 11\."):
        loop.fit(Counter(), datamodule=Data())


def test_a_loader_that_does_not_read_the_batch_size_is_told_of(recommends_eight, tmp_path, monkeypatch):
    """The recommendation would have no effect without a word."""
    data = Data()
    monkeypatch.setattr(data, "train_dataloader", lambda: Data()._loader())
    with pytest.warns(UserWarning, match="A data loader's batch size is 2, not the 8 found: make it of batch_size"):
        trainer(tmp_path, CubatchBatchSizeFinder(**SHORT)).fit(Counter(), datamodule=data)


@pytest.mark.parametrize("call", ["validate", "test", "predict"])
def test_other_stages_use_the_size_found_too(tmp_path, call):
    """Outputs of the run are of batches of the answer; all is in evaluation mode, also the steps that were timed."""
    model, data, finder, modes = Counter(), Data(), CubatchBatchSizeFinder(**SHORT), set()
    model.net.register_forward_hook(lambda net, *_: modes.update(part.training for part in net.modules()))
    given = getattr(trainer(tmp_path, finder), call)(model, datamodule=data)

    assert finder.result.mode == "inference"
    assert modes == {False}
    assert data.batch_size == finder.optimal_batch_size <= NUM_SAMPLES
    num_batches = -(-NUM_SAMPLES // data.batch_size)
    assert len(given if call == "predict" else model.outputs) == num_batches


def test_it_refuses_what_lightnings_refuses(tmp_path):
    """It is one of Lightning's, so the tuner and its checks know it: no size to set, loaders handed to fit."""
    assert issubclass(CubatchBatchSizeFinder, BatchSizeFinder)
    with pytest.raises(MisconfigurationException, match="dataloaders passed directly"):
        trainer(tmp_path, CubatchBatchSizeFinder()).fit(Counter(), Data()._loader())
    with pytest.raises(MisconfigurationException, match="Field size not found"):
        trainer(tmp_path, CubatchBatchSizeFinder(batch_arg_name="size")).fit(Counter(), datamodule=Data())


@pytest.mark.parametrize("name", ["target_batch_size", "max_batch_size"])
@pytest.mark.parametrize("size", [0, 2.5, "64"])
def test_sizes_are_checked_where_the_callback_is_made(size, name):
    """Each is a whole number of samples."""
    with pytest.raises(InvalidArgument) as caught:
        CubatchBatchSizeFinder(**{name: size})
    assert caught.value.field == name


class DrawsItself(Counter):
    """Takes the batches out of the loader by itself."""

    def training_step(self, dataloader_iter):
        return self._loss(next(dataloader_iter)[0])


class Follows(Counter):
    """Updates an average after each batch."""

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.total += 1


class Average(Callback):
    """Averages weights after each optimizer step, in training and nowhere else."""

    def on_before_zero_grad(self, *_):
        """Do nothing."""


def test_hooks_in_a_step_that_are_not_timed_come_first(tmp_path):
    """An average of weights takes time in each step of the loop, of the module or of a callback."""
    finder = CubatchBatchSizeFinder(**SHORT | {"budget": 2.0})
    hooks = "on_train_batch_start, on_train_batch_end of Follows and on_before_zero_grad of Average"
    with pytest.warns(UserWarning, match=f"Not timed: {hooks}"):
        trainer(tmp_path, finder, Average(), limit_val_batches=0).fit(Follows(), datamodule=Data())
    assert finder.result.reasons[0].startswith(f"Not timed: {hooks}.") or not finder.result.recommended


def test_no_hook_is_named_where_there_is_none(tmp_path):
    """Validation calls none of the hooks of training, and callbacks that a Trainer has by itself do not count."""
    finder = CubatchBatchSizeFinder(**SHORT | {"budget": 2.0})
    trainer(tmp_path, finder, Average()).validate(Follows(), datamodule=Data())
    assert not finder.result.reasons[0].startswith("Not timed")


class Moves(Data):
    """Gives the images another shape before they go to the device."""

    def on_before_batch_transfer(self, batch, dataloader_idx):
        return batch[0].flatten(1), batch[1]


class Flat(Counter):
    """Takes no other shape, measures its accuracy, has a part that is never trained and tensors of its own making."""

    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(12, 3)
        self.teacher = torch.nn.BatchNorm1d(12).eval()
        self.accuracy = Accuracy(task="multiclass", num_classes=3)
        self.was_eval = []

    def training_step(self, batch, batch_idx):
        x, y = batch
        self.was_eval.append(not self.teacher.training)
        self.accuracy(self.net(x), y)
        return self._loss((self.teacher(x) @ torch.eye(12, device=x.device), y))

    def configure_optimizers(self):
        return Positive(self.parameters(), lr=0.1)


class Positive(torch.optim.SGD):
    """Refuses a rate of 0, as SparseAdam does."""

    def __init__(self, params, lr):
        if not lr > 0:
            raise ValueError("Invalid learning rate")
        super().__init__(params, lr=lr)


def test_a_step_is_what_lightnings_loop_makes_of_it(tmp_path):
    """Batches are changed by the hook, tensors made in its precision, metrics kept, parts in evaluation mode so."""
    model, finder = Flat(), CubatchBatchSizeFinder(**SHORT)
    trainer(tmp_path, finder, limit_val_batches=0, precision="64-true").fit(model, datamodule=Moves())
    assert all_ran(finder)
    assert finder.result.dtype == "float64"
    assert all(m.predicted_peak_bytes for m in finder.result.measurements)
    assert all(model.was_eval)


def test_a_dry_run_of_lightnings_finds_nothing(tmp_path):
    """As Lightning's finder: fast_dev_run runs a single batch of whatever size there is."""
    data, finder = Data(), CubatchBatchSizeFinder(**SHORT)
    trainer(tmp_path, finder, fast_dev_run=True).fit(Counter(), datamodule=data)
    assert (finder.result, finder.optimal_batch_size, data.batch_size) == (None, None, 2)


class Pairs(Data):
    """Labelled images beside seven times as many without labels, as FixMatch has them."""

    def __init__(self, ratio):
        super().__init__()
        self.batch_size, self.ratio = 4, ratio

    def train_dataloader(self):
        images = torch.utils.data.TensorDataset(torch.zeros(NUM_SAMPLES, 3, 2, 2))
        sizes = {"labelled": self.batch_size, "unlabelled": self.ratio * self.batch_size}
        return {name: torch.utils.data.DataLoader(images, batch_size=size) for name, size in sizes.items()}


class TakesPairs(Counter):
    """Steps on both, whatever there is of each."""

    on_train_batch_start = pl.LightningModule.on_train_batch_start

    def training_step(self, batch, batch_idx):
        return self.net(torch.cat([images for (images,) in batch.values()])).square().mean()


def test_loaders_of_one_batch_size_are_taken(recommends_eight, tmp_path):
    """A batch has as many samples of each, so one number is its size."""
    data = Pairs(1)
    with pytest.warns(UserWarning, match="data loaders were not measured"):
        trainer(tmp_path, CubatchBatchSizeFinder(**SHORT), limit_val_batches=0).fit(TakesPairs(), datamodule=data)
    assert data.batch_size == 8


def two_views(self, batch, dataloader_idx):
    """Give two views of each image one after the other, as SimCLR has them."""
    return torch.cat([batch[0], batch[0]]), batch[1].repeat(2)


class BesideTable(Data):
    """Gives a table of classes with each batch."""

    def on_before_batch_transfer(self, batch, dataloader_idx):
        return (*batch, torch.zeros(3, 5))


class TakesTable(Counter):
    def training_step(self, batch, batch_idx):
        return self._loss(batch[:2])


class Noting(Counter):
    """Notes the rows of its batches in a list of the test, which is not restored."""

    def __init__(self, rows):
        super().__init__()
        self.note = rows.append

    def training_step(self, batch, batch_idx):
        self.note(len(batch[0]))
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("hook", ["on_before_batch_transfer", "on_after_batch_transfer"])
def test_a_batch_with_several_rows_to_a_sample_counts_the_samples(tmp_path, hook):
    """A size in rows would be set as one of images, of which each makes two."""
    finder, rows = CubatchBatchSizeFinder(**SHORT), []
    views = type("Views", (Data,), {hook: two_views})()
    trainer(tmp_path, finder, limit_val_batches=0).fit(Noting(rows), datamodule=views)
    assert all_ran(finder)
    assert {2 * n for n in measured_sizes(finder)} <= set(rows)


class Finished:
    """Gives finished batches, so that none of another size can be drawn."""

    def __init__(self, loader):
        self.loader, self.batch_size = loader, loader.batch_size

    def __iter__(self):
        return iter(self.loader)

    def __len__(self):
        return len(self.loader)


def finished(self):
    return Finished(self._loader())


REFUSED = {
    "optimizes by hand": (Counter, {"automatic_optimization": False}, Data, "time them with autotune_callable"),
    "draws its batches": (DrawsItself, {}, Data, r"training_step.*dataloader_iter"),
    "trains nothing": (Counter, {"configure_optimizers": lambda: None}, Data, r"configure_optimizers.*\.validate"),
    "loaders of unlike sizes": (
        TakesPairs, {}, lambda: Pairs(7), r"batch_size must be the same of all data loaders.*4 and 28.*callable",
    ),
    "finished batches of more rows than samples": (
        Counter, {},
        type("Views", (Data,), {"on_before_batch_transfer": two_views, "train_dataloader": finished}),
        r"axis 0 .* at most 2, the batch size of the data loader, got 4\. Time",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_tuned_is_refused_and_left_as_it_was(case, tmp_path):
    """The error names what prevents the search, and another way."""
    make, changed, data, match = REFUSED[case]
    model = make()
    for name, value in changed.items():
        setattr(model, name, value)
    with pytest.raises(InvalidArgument, match=match):
        trainer(tmp_path, CubatchBatchSizeFinder(**SHORT), limit_val_batches=0).fit(model, datamodule=data())
    assert "log" not in vars(model)


class Graphs(Data):
    """Gives graphs, the nodes of which a batch holds one after the other."""

    def train_dataloader(self):
        def joined(graphs):
            index = [torch.full((len(nodes),), place) for place, (nodes, _) in enumerate(graphs)]
            return torch.cat([nodes for nodes, _ in graphs]), torch.cat(index), torch.stack([y for _, y in graphs])

        graphs = [(torch.randn(3 + place % 4, 5), torch.tensor(place % 3)) for place in range(NUM_SAMPLES)]
        return torch.utils.data.DataLoader(graphs, batch_size=self.batch_size, collate_fn=joined)


class OfGraphs(Counter):
    """Adds up the nodes of each graph, and notes the number of graphs."""

    def __init__(self, graphs):
        super().__init__()
        self.net, self.note = torch.nn.Linear(5, 3), graphs.append

    def training_step(self, batch, batch_idx):
        nodes, index, y = batch
        self.note(len(y))
        sums = torch.zeros(len(y), 3).index_add(0, index, self.net(nodes))
        return torch.nn.functional.cross_entropy(sums, y)


def test_the_size_of_graphs_is_their_number_not_that_of_nodes(tmp_path):
    """The loader's samples are graphs: a size found in nodes would be several times too large."""
    finder, graphs = CubatchBatchSizeFinder(**SHORT), []
    trainer(tmp_path, finder, limit_val_batches=0).fit(OfGraphs(graphs), datamodule=Graphs())
    assert all_ran(finder)
    assert measured_sizes(finder) <= set(graphs)
    assert max(measured_sizes(finder)) <= NUM_SAMPLES


class Texts(Data):
    """Gives images as text, of which tensors are made on the way to the device."""

    def train_dataloader(self):
        return torch.utils.data.DataLoader(list(map(str, range(NUM_SAMPLES))), batch_size=self.batch_size)

    def transfer_batch_to_device(self, batch, device, dataloader_idx):
        numbers = torch.tensor(list(map(int, batch)), device=device)
        return numbers.reshape(-1, 1, 1, 1) * torch.ones(3, 2, 2, device=device), numbers % 3


def test_a_batch_is_what_the_hooks_on_its_way_to_the_device_make_of_it(tmp_path):
    """A loader may give no tensors at all: such a batch was refused."""
    finder = CubatchBatchSizeFinder(**SHORT)
    trainer(tmp_path, finder, limit_val_batches=0).fit(Counter(), datamodule=Texts())
    assert all_ran(finder)


def test_tensors_that_do_not_hold_the_batch_are_to_be_named(tmp_path):
    """They are the same at every size: no size is set unless the user has said that they are."""
    finder = CubatchBatchSizeFinder(**SHORT)
    with pytest.warns(UserWarning, match=r"batch\[2\] of shape \(3, 5\) did not grow"):
        trainer(tmp_path, finder, limit_val_batches=0).fit(TakesTable(), datamodule=BesideTable())
    assert finder.optimal_batch_size is None
    named = CubatchBatchSizeFinder(constant_inputs=["batch[2]"], **SHORT)
    trainer(tmp_path, named, limit_val_batches=0).fit(TakesTable(), datamodule=BesideTable())
    assert named.optimal_batch_size is not None


class Prepares(Counter):
    """Makes in one hook what the next ones need, in Lightning's order, and changes a parameter in the last."""

    def on_fit_start(self):
        self.was_prepared, self.scale = hasattr(self, "scale"), torch.tensor(0.5)

    def on_after_batch_transfer(self, batch, dataloader_idx):
        return batch[0] * self.scale, batch[1]

    def on_train_start(self):
        super().on_train_start()
        self.weight = 2 * self.scale

    def on_train_epoch_start(self):
        self.outs = [self.weight]

    def on_train_batch_start(self, batch, batch_idx):
        super().on_train_batch_start(batch, batch_idx)
        self.begun = self.outs[0]
        with torch.no_grad():
            self.net[-1].bias.add_(1)

    def training_step(self, batch, batch_idx):
        return self._loss(batch) * self.begun


def test_hooks_before_a_first_step_make_what_it_needs_and_leave_nothing(tmp_path):
    """Steps ran at no size without them; Lightning's own start meets the parameters and attributes of before."""
    model, finder = Prepares(), CubatchBatchSizeFinder(**SHORT)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    trainer(tmp_path, finder, limit_val_batches=0).fit(model, datamodule=Data())
    assert all_ran(finder)
    assert not model.was_prepared
    assert all(torch.equal(model.at_start[name], value) for name, value in before.items())


class Averaged(Counter):
    """Validates with averaged weights, which it swaps in before and out afterwards."""

    def on_validation_start(self):
        self.backup = [parameter.detach().clone() for parameter in self.parameters()]
        for parameter in self.parameters():
            parameter.data.copy_(torch.full_like(parameter, 0.5))

    def on_validation_end(self):
        for parameter, value in zip(self.parameters(), self.backup, strict=True):
            parameter.data.copy_(value)


def test_weights_that_a_hook_swaps_in_before_validation_are_put_back(tmp_path):
    """Else Lightning's own start takes the averaged ones for the trained, which its end no longer puts back."""
    model, finder = Averaged(), CubatchBatchSizeFinder(**SHORT)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    trainer(tmp_path, finder).validate(model, datamodule=Data())
    assert finder.result.mode == "inference"
    assert all(map(torch.equal, model.parameters(), before))
