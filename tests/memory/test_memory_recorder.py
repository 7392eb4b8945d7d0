"""The walk and the recorder, against bytes counted by hand and against torch's own profiler."""

import gc
import weakref

import pytest
import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint

from zero_mini.memory.formulas import CATEGORIES, PlainTraining, walk
from zero_mini.memory.recorder import Recorder, live_bytes


class Held:
    """Stands in for a handle: whatever was put in is what it keeps alive."""

    def __init__(self, *items):
        self.items = items

    def tensors(self):
        return iter(self.items)


class Residual(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = torch.nn.LayerNorm(width)
        self.up = torch.nn.Linear(width, 4 * width)
        self.down = torch.nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


class Tower(torch.nn.Module):
    """Equal residual blocks, optionally checkpointed."""

    def __init__(self, width, depth, use_reentrant=None):
        super().__init__()
        self.blocks = torch.nn.ModuleList(Residual(width) for _ in range(depth))
        self.use_reentrant = use_reentrant

    def forward(self, x):
        for block in self.blocks:
            if self.use_reentrant is None:
                x = block(x)
            else:
                # The state of the generator would be 5056 bytes a block.
                x = checkpoint(block, x, use_reentrant=self.use_reentrant, preserve_rng_state=False)
        return x


# --- the walk ---------------------------------------------------------------------------------


def test_walk_counts_a_shared_storage_once_and_the_first_category_wins():
    flat = torch.zeros(100)
    held = Held(
        ("optimizer", "flat", flat[:50]),
        ("parameters", "view", flat[50:].view(5, 10)),
        ("gradients", "grad", torch.zeros(7, dtype=torch.bfloat16)),
    )
    assert walk(held) == {
        "parameters": 0,
        "gradients": 14,
        "optimizer": 400,  # the whole storage, though only half of it was shown
        "activations": 0,
        "communication": 0,
        "other": 0,
    }


def test_walk_counts_an_expanded_scalar_and_a_meta_tensor_for_what_they_are():
    held = Held(
        ("parameters", "nan", torch.tensor(float("nan")).expand(1000, 1000)),
        ("parameters", "meta", torch.empty(1000, device="meta")),
    )
    assert walk(held)["parameters"] == 4


def test_walk_can_be_limited_to_one_device():
    held = Held(("parameters", "cpu", torch.zeros(10)))
    assert walk(held, "cpu")["parameters"] == 40
    assert sum(walk(held, "cuda").values()) == 0


def test_walk_refuses_an_unknown_category():
    with pytest.raises(ValueError, match="weights"):
        walk(Held(("weights", "w", torch.zeros(1))))


def test_walk_of_plain_training_is_16_bytes_a_parameter():
    model = torch.nn.Linear(100, 100, bias=False)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 100)).sum().backward()
    optimizer.step()
    psi, step_counter = 100 * 100, 4
    bytes_by_category = walk(PlainTraining(model, optimizer))
    assert bytes_by_category["parameters"] == 4 * psi
    assert bytes_by_category["gradients"] == 4 * psi
    assert bytes_by_category["optimizer"] == 8 * psi + step_counter


# --- what lives when --------------------------------------------------------------------------


def test_a_two_layer_network_costs_what_is_counted_by_hand():
    with Recorder() as recorder:
        w1 = torch.nn.Parameter(torch.ones(8, 4))  # 128 bytes
        w2 = torch.nn.Parameter(torch.ones(2, 8))  # 64
        x = torch.ones(3, 4)  # 48
        recorder.follow(Held(("parameters", "w1", w1), ("parameters", "w2", w2)))
        states = 128 + 64
        assert recorder.live_bytes() == states + 48

        recorder.mark("forward")
        # h and relu(h) are 96 bytes each; relu saves its result only, so h dies.
        loss = ((x @ w1.t()).relu() @ w2.t()).sum()
        assert recorder.peak_bytes == states + 48 + 96 + 96
        assert recorder.live_bytes() == states + 48 + 96 + 4

        recorder.mark("backward")
        loss.backward()
        # The peak is in relu's backward: relu(h), the gradient that comes in and the one that goes
        # out, 96 bytes each; the gradient of w2 is there, that of w1 is not; loss and its gradient.
        assert recorder.peak_bytes == states + 48 + 3 * 96 + 64 + 4 + 4
        assert recorder.live_bytes() == states + states + 48 + 4

        recorder.mark("end")
        w1.grad = w2.grad = None
        del loss
        assert recorder.live_bytes() == states + 48

    assert recorder.peak() == {
        "parameters": states,
        "gradients": 64,
        "optimizer": 0,
        "activations": 96 + 4,
        "communication": 0,
        "other": 48 + 96 + 96 + 4,
    }


def test_a_storage_saved_for_backward_alone_still_counts():
    x = torch.ones(100, requires_grad=True)
    with Recorder(known=[x]) as recorder:
        y = (x * 2).exp()  # saves its result, which then has no name in Python
        total = y.sum()
        del y
        assert recorder.live_bytes() == 400 + 400 + 4
        del total
        assert recorder.live_bytes() == 400


def test_views_and_in_place_operations_count_nothing():
    x = torch.ones(100)
    with Recorder(known=[x]) as recorder:
        before = len(recorder.events)
        row = x.view(10, 10)[3]
        row.add_(1).mul_(2)
        x.detach().clamp_(0)
        torch.add(x, 1, out=x)
        assert len(recorder.events) == before
        assert recorder.live_bytes() == 400


def test_a_freed_tensor_is_counted_freed_at_its_moment():
    with Recorder() as recorder:
        x = torch.ones(100)
        recorder.mark("later")
        alias = weakref.ref(x)
        del x
        assert alias() is None
        assert recorder.live_bytes() == 0
    assert [(e.moment, e.delta_bytes) for e in recorder.events] == [(0, 400), (1, -400)]
    assert [label for label, _ in recorder.moments] == ["start", "later"]


def test_what_dies_after_the_region_is_no_part_of_its_story():
    with Recorder() as recorder:
        x = torch.ones(100)
    del x
    assert recorder.live_bytes() == 400
    assert len(recorder.events) == 1


def test_a_cycle_counts_until_it_is_broken():
    with Recorder() as recorder:
        node = {"tensor": torch.ones(100)}
        node["itself"] = node
        del node["tensor"]
        assert recorder.live_bytes() == 0


def test_resizing_a_storage_counts_both_ways():
    with Recorder() as recorder:
        x = torch.ones(100)
        x.untyped_storage().resize_(0)
        assert recorder.live_bytes() == 0
        x.untyped_storage().resize_(800)
        assert recorder.live_bytes() == 800
        x.resize_(300)  # an operation this time, and it grows
        assert recorder.live_bytes() == 1200
        assert recorder.peak_bytes == 1200


def test_a_tensor_from_before_the_region_counts_from_its_first_use():
    x = torch.ones(100)
    with Recorder() as recorder:
        assert recorder.live_bytes() == 0
        x.add_(1)
        assert recorder.live_bytes() == 400
        assert recorder.events[0].op == "found"


def test_other_devices_do_not_count():
    with Recorder() as recorder:
        torch.empty(100, device="meta")
        assert recorder.events == []


def test_only_the_recorder_can_tell_the_live_bytes_of_the_cpu():
    with pytest.raises(ValueError, match="Recorder"):
        live_bytes("cpu")
    with Recorder() as recorder:
        x = torch.ones(100)
        assert live_bytes("cpu", recorder) == x.nbytes


# --- categories -------------------------------------------------------------------------------


def train(model, optimizer, recorder, steps=2, width=32):
    """Ordinary steps, with a mark at each moment."""
    for _ in range(steps):
        recorder.mark("forward")
        loss = model(torch.ones(4, width)).square().mean()
        recorder.mark("backward")
        loss.backward()
        recorder.mark("step")
        optimizer.step()
        optimizer.zero_grad()
    recorder.mark("end")


def test_walk_and_recorder_agree_within_one_percent_from_construction_on():
    with Recorder() as recorder:
        model = Tower(width=32, depth=3)
        optimizer = torch.optim.AdamW(model.parameters())
        plain = PlainTraining(model, optimizer)
        recorder.follow(plain)
        train(model, optimizer, recorder)
        walked = walk(plain)
        assert sum(walked.values()) == pytest.approx(recorder.live_bytes(), rel=0.01)
        model(torch.ones(4, 32)).sum().backward()
        recorder.mark("a quiet moment with gradients")
        walked = walk(plain)
        assert walked["gradients"] > 0
        assert sum(walked.values()) == pytest.approx(recorder.live_bytes(), rel=0.01)
    latest = {category: series[-1] for category, series in recorder.timeline().items()}
    for category in ("parameters", "gradients", "optimizer"):
        assert latest[category] == walked[category]


def test_a_leak_shows_as_a_difference_between_walk_and_recorder():
    with Recorder() as recorder:
        model = torch.nn.Linear(10, 10)
        leak = torch.zeros(1000)
        optimizer = torch.optim.SGD(model.parameters())
        assert recorder.live_bytes() - sum(walk(PlainTraining(model, optimizer)).values()) == 4000
        del leak


def test_the_timeline_adds_up_to_the_live_bytes_and_peak_is_its_highest_point():
    with Recorder() as recorder:
        model = Tower(width=32, depth=2)
        optimizer = torch.optim.AdamW(model.parameters())
        recorder.follow(PlainTraining(model, optimizer))
        train(model, optimizer, recorder)
        live = recorder.live_bytes()
    timeline = recorder.timeline()
    assert tuple(timeline) == CATEGORIES
    totals = [sum(column) for column in zip(*timeline.values(), strict=True)]
    assert len(totals) == len(recorder.events)
    assert totals[-1] == live
    assert max(totals) == recorder.peak_bytes == sum(recorder.peak().values())
    assert all(series[0] >= 0 and min(series) >= 0 for series in timeline.values())


def test_gradients_are_known_even_if_a_hook_frees_them_within_backward():
    with Recorder() as recorder:
        model = torch.nn.Linear(10, 10, bias=False)
        recorder.follow(PlainTraining(model, torch.optim.SGD(model.parameters())))

        def discard(parameter):
            parameter.grad = None

        model.weight.register_post_accumulate_grad_hook(discard)
        model(torch.ones(1, 10)).sum().backward()
        assert model.weight.grad is None
        assert recorder.live_bytes() == 400
    assert max(recorder.timeline()["gradients"]) == 400
    assert recorder.timeline()["gradients"][-1] == 0


def test_what_was_there_before_is_no_activation_of_the_forward_that_first_uses_it():
    weight, x = torch.ones(10, 10, requires_grad=True), torch.ones(1, 10)
    with Recorder() as recorder:
        recorder.mark("forward")
        y = (x @ weight).relu()
        recorder.mark("backward")
    assert recorder.timeline()["activations"][-1] == y.nbytes
    assert recorder.timeline()["other"][-1] == weight.nbytes + x.nbytes


def test_an_error_in_the_region_is_not_covered_by_one_of_the_owner():
    with pytest.raises(RuntimeError, match="the cause"), Recorder() as recorder:
        owner = Held()
        recorder.follow(owner)
        owner.items = [("no category", "x", torch.zeros(1))]
        raise RuntimeError("the cause")


def test_what_a_collective_is_given_is_a_communication_buffer():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with Recorder() as recorder:
            buffer = torch.ones(100)
            dist.all_reduce(buffer, async_op=True).wait()
            assert recorder.peak()["communication"] == 400
            # What the handle says comes first.
            recorder.follow(Held(("gradients", "flat", buffer)))
            dist.all_reduce(buffer)
            assert recorder.peak()["gradients"] == 400
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointing_keeps_the_block_inputs_and_recomputes_one_block(use_reentrant):
    width, depth, batch = 32, 6, 64
    one = 4 * batch * width  # bytes of a block's input
    # A block saves its norm's output and statistics, up's output and gelu's.
    block = one + 2 * 4 * batch + 4 * one + 4 * one

    def activations(use_reentrant):
        """What forward leaves, and the most there is in backward."""
        with Recorder() as recorder:
            model = Tower(width, depth, use_reentrant)
            recorder.follow(PlainTraining(model, torch.optim.SGD(model.parameters())))
            x = torch.ones(batch, width, requires_grad=True)
            recorder.mark("forward")
            loss = model(x).sum()
            recorder.mark("backward")
            loss.backward()
            recorder.mark("end")
            assert recorder.live_bytes() == 2 * recorder.peak()["parameters"] + 2 * one + 4
        series = recorder.timeline()["activations"]
        assert series[-1] == 4  # the loss
        _, backward = recorder.moments[-2]
        return series[backward - 1], max(series[backward:])

    # The first block's input is not born in forward; the last one's output is not saved.
    inputs = (depth - 1) * one + 4
    assert activations(None) == (inputs + depth * block, inputs + depth * block)

    kept, peak = activations(use_reentrant)
    assert kept == inputs
    # One block is recomputed, to its end only if re-entrant; its temporaries count.
    assert inputs + block <= peak <= inputs + block + 2 * one


# --- peaks ------------------------------------------------------------------------------------


def step_peak(**options):
    """Bytes that an AdamW step needs above what was there before it."""
    model = Tower(width=32, depth=4)
    optimizer = torch.optim.AdamW(model.parameters(), **options)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()  # creates the states
    with Recorder() as recorder:
        recorder.follow(PlainTraining(model, optimizer))
        before = recorder.live_bytes()
        optimizer.step()
    numels = [p.numel() for p in model.parameters()]
    return recorder.peak_bytes - before, 4 * sum(numels), 4 * max(numels)


def test_the_temporaries_of_foreach_are_as_large_as_the_model():
    extra, model_bytes, _ = step_peak(foreach=True)
    assert model_bytes <= extra <= 1.1 * model_bytes


def test_the_temporaries_of_a_loop_are_as_large_as_one_parameter():
    extra, _, largest_bytes = step_peak(foreach=False)
    assert largest_bytes <= extra <= 2.1 * largest_bytes


def test_fused_adamw_needs_no_temporaries():
    extra, _, largest_bytes = step_peak(fused=True)
    assert extra < 0.01 * largest_bytes


@pytest.mark.parametrize("options", [{"foreach": True}, {"foreach": False}, {"fused": True}])
def test_live_and_peak_are_those_of_the_profiler(options):
    def run():
        model = Tower(width=32, depth=3)
        optimizer = torch.optim.AdamW(model.parameters(), **options)
        for _ in range(2):
            model(torch.ones(4, 32)).square().mean().backward()
            optimizer.step()
        return model, optimizer

    with Recorder() as recorder:
        kept = run()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        kept_too = run()
    assert len(kept) == len(kept_too)

    live = peak = 0
    events = [e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
    for event in sorted(events, key=lambda e: e.start_ns()):
        live += event.nbytes()
        peak = max(peak, live)
    # Exact but for what a kernel allocates and frees within itself, which the recorder cannot see.
    assert recorder.live_bytes() == pytest.approx(live, rel=0.005)
    assert recorder.peak_bytes == pytest.approx(peak, rel=0.005)


@pytest.mark.gpu
@pytest.mark.parametrize("use_reentrant", [None, False, True])
def test_on_cuda_the_recorder_agrees_with_the_allocator_to_the_byte(use_reentrant):
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")

    def run():
        with torch.device("cuda"):
            model = Tower(256, 6, use_reentrant)
            x = torch.ones(16, 256, requires_grad=True)
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(2):
            model(x).sum().backward()  # in a thread of autograd's own
            optimizer.step()
        return PlainTraining(model, optimizer)

    run()  # cuBLAS allocates a workspace in every thread that first uses it, and keeps it
    gc.collect()
    before, requested = live_bytes("cuda"), torch.cuda.memory_stats()["requested_bytes.all.current"]
    torch.cuda.reset_peak_memory_stats()
    with Recorder(device="cuda") as recorder:
        plain = run()
    stats = torch.cuda.memory_stats()
    assert recorder.live_bytes() == stats["requested_bytes.all.current"] - requested
    assert recorder.peak_bytes == stats["requested_bytes.all.peak"] - requested
    # The allocator rounds up to 512 bytes, and more where it does not split a segment.
    assert live_bytes("cuda") - before == pytest.approx(recorder.live_bytes(), rel=0.01)
    assert sum(walk(plain, "cuda").values()) == pytest.approx(recorder.live_bytes(), rel=0.01)
