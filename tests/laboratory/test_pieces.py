"""Other systems than ZeRO: each piece is exact, and stands beside torch DDP or a plain loop."""

import zlib

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from zero_mini import zeroify
from zero_mini.laboratory import balance, compression, deferred, sampling, server, sparse
from zero_mini.laboratory.task import batch, byte_model, gap, gradient_of, loss_of, momentum, parameters_of, train

PSI = 50_624
STAGES = [f"stage {stage}" for stage in range(4)]

# --- servers ----------------------------------------------------------------------------------


@pytest.mark.parametrize("N, apart", [(2, 0.0), (4, 1e-7)])
def test_servers_train_as_torch_ddp_and_their_link_grows_with_n(ranks, N, apart):
    for rank, found in enumerate(ranks(N).run(server.compare_servers, steps=3)):
        assert max(found["gaps"].values()) <= apart
        for kind in ("GradientServer", "ParameterServer"):  # sent and received, fp32
            assert found["link_bytes"][kind] == 2 * 4 * PSI * ((N - 1) if rank == server.SERVER else 1)
        for stage in STAGES[:3]:  # units are padded to a multiple of the ranks' slices
            assert found["link_bytes"][stage] == pytest.approx(2 * 2 * 4 * PSI * (N - 1) / N, rel=0.01)
        assert 1.1 < found["link_bytes"]["stage 3"] / found["link_bytes"]["stage 2"] < 1.5


def test_a_server_holds_all_states_and_a_rank_of_stage_3_a_part(ranks):
    for rank, kept in enumerate(ranks(4).run(server.compare_memory)):
        steps = 4 * 7  # AdamW counts the steps of each of seven parameters
        assert kept["ParameterServer"] == (16 * PSI + steps if rank == server.SERVER else 8 * PSI)
        assert kept["GradientServer"] == 16 * PSI + steps
        assert kept["stage 1"] == pytest.approx((8 + 8 / 4) * PSI, rel=0.01)
        assert kept["stage 3"] < kept["stage 2"] < kept["stage 1"] < kept["stage 0"]


def test_weights_of_unequal_workers_make_one_batch(ranks):
    def work():
        sizes, messages = [8, 24], []
        x, y = (part.split(sizes) for part in batch(0, rows=32))
        joint, model = byte_model().double(), byte_model().double()
        loss_of(joint, (torch.cat(x), torch.cat(y))).backward()
        servers = server.GradientServer(model, momentum, weights=[0.25, 0.75])
        loss_of(model, (x[servers.rank], y[servers.rank])).backward()
        servers.step()
        for weights in ([0.5, 0.25], [1.0], [1.5, -0.5]):
            try:
                server.GradientServer(model, momentum, weights)
            except ValueError as error:
                messages.append(str(weights) in str(error))
        has_optimizer = server.ParameterServer(byte_model(), momentum).optimizer is not None
        return gap(gradient_of(model), gradient_of(joint)), messages, has_optimizer

    for rank, (apart, messages, has_optimizer) in enumerate(ranks(2).run(work)):
        assert apart < 1e-15 and messages == [True] * 3 and has_optimizer == (rank == server.SERVER)


def test_the_asynchronous_server_is_late_by_one_turn_less_than_it_has_workers(ranks):
    assert ranks(4).run(server.asynchronous_gap, turns=7)[server.SERVER] == 0  # three workers: staleness 2
    assert ranks(2).run(server.asynchronous_gap, turns=5)[server.SERVER] == 0  # one: it is never late
    curves = ranks(2).run(server.compare_staleness, turns=120, stalenesses=(0, 8))[0]
    assert curves["staleness 0"][-1] < 3.5 < 7 < curves["staleness 8"][-1]


def test_a_staleness_of_0_is_plain_training(ranks):
    def work():
        models = byte_model(), byte_model()
        server.delayed(models[0], momentum(models[0]), turns=4, staleness=0)
        train(models[1], momentum(models[1]), 4)
        return gap(*map(parameters_of, models))

    assert ranks(2).run(work)[0] == 0


# --- deferred all-reduce ----------------------------------------------------------------------


def test_reducing_once_equals_no_sync_and_costs_what_stage_2_saves(ranks):
    k, N = 4, 2
    for rows in ranks(N).run(deferred.compare_accumulation, micro_batches=k):
        update = rows.pop("torch DDP")["update"]
        sent = {name: row["sent_numel"] * N / (N - 1) / row["psi"] for name, row in rows.items()}
        for name, row in rows.items():
            defers = name.endswith("deferred") and not name.startswith(("stage 2", "stage 3"))
            assert row["to_large"] < 1e-6 * update + 1e-8
            assert row["to_ddp"] == 0 if defers else row["to_ddp"] < 1e-8
            whole = defers or name.startswith(("stage 0", "stage 1"))
            assert row["kept_bytes"] == 4 * row["psi"] // (1 if whole else N)
        for stage, at_once, once in (("stage 0", 2 * k, 2), ("stage 1", k + 1, 2), ("Deferred2", k + 1, 2)):
            assert (sent[f"{stage}, at once"], sent[f"{stage}, deferred"]) == (at_once, once)
        assert sent["stage 2, deferred"] == sent["stage 2, at once"] == k + 1
        assert sent["Deferred3, at once"] - sent["Deferred3, deferred"] == k - 1
        assert sent["stage 3, deferred"] == sent["stage 3, at once"] == sent["Deferred3, at once"]


# --- sparse gradients -------------------------------------------------------------------------


def test_top_k_sends_the_largest_elements_and_the_rest_is_what_is_left():
    values = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    codec = sparse.TopK(0.013)
    message = codec.encode(values)
    decoded = codec.decode(message, 1000)
    sent = decoded != 0
    assert message.nbytes == 8 * 13 and sent.sum() == 13
    assert values[sent].abs().min() > values[~sent].abs().max()
    assert torch.equal(decoded + (values - decoded), values) and torch.equal(decoded[sent], values[sent])
    for density in (0, 1.5):
        with pytest.raises(ValueError, match=str(density)):
            sparse.TopK(density)


def test_top_k_of_all_is_the_all_reduce_and_one_percent_needs_feedback(ranks):
    found = ranks(2).run(sparse.compare_densities, steps=40, densities=(1.0, 0.01))[0]
    dense = found["all-reduce"]
    for name in ("top 100.0%", "top 100.0%, feedback"):
        assert found[name]["losses"] == dense["losses"]
        assert found[name]["sent_bytes"]["all_gather"] == 2 * dense["sent_bytes"]["all_reduce"]  # break-even at 1/N
    one, fed = found["top 1.0%"], found["top 1.0%, feedback"]
    assert abs(fed["held_out"] - dense["held_out"]) < 0.2 < one["held_out"] - dense["held_out"]
    assert one["sent_bytes"]["all_gather"] < 0.011 * 2 * dense["sent_bytes"]["all_reduce"]
    assert (one["residual_bytes"], fed["residual_bytes"]) == (0, pytest.approx(4 * PSI, rel=0.01))


def test_feedback_sends_everything_at_last(ranks):
    """Of a gradient that comes once, k elements leave in each step; then nothing is left."""

    def work():
        comm, total = compression.Compressed(sparse.TopK(0.25), feedback=True), torch.zeros(64)
        gradient = torch.randint(-64, 65, (64,)).float() * dist.get_world_size()  # exact in any order
        mean = gradient.clone()
        dist.all_reduce(mean)
        for step in range(4):
            buffer = gradient.clone() if step == 0 else torch.zeros(64)
            comm.all_reduce(buffer, "unit").wait()
            total += buffer
        return torch.equal(total, mean / dist.get_world_size()), comm.residuals["unit"].abs().max().item()

    assert ranks(2).run(work) == [(True, 0.0)] * 2


@pytest.mark.parametrize("N, apart", [(2, 0.0), (4, 1e-8)])
def test_rows_of_an_embedding_are_exchanged_exactly(ranks, N, apart):
    for found in ranks(N).run(sparse.exchange_embedding, vocab=512, channels=8, tokens=20):
        assert found["gap"] <= apart < found["largest"] / 1e5
        assert found["row_bytes"] < found["all_reduce_bytes"] / 5


# --- compression ------------------------------------------------------------------------------


def test_errors_of_codecs_are_within_their_bounds():
    values = torch.randn(3200, generator=torch.Generator().manual_seed(1)) * torch.logspace(-9, 2, 3200)
    blocks = values.view(-1, compression.BLOCK).abs().amax(1, keepdim=True).expand(-1, compression.BLOCK).flatten()
    mean = values.abs().mean()
    for codec, nbytes, bound in (
        (compression.Cast(), 4 * 3200, torch.zeros(3200)),
        (compression.Cast(torch.bfloat16), 2 * 3200, values.abs() / 2**8),
        (compression.Int8(), 3200 + 4 * 100, blocks / 254 * (1 + 1e-6)),
        (compression.OneBit(), 400 + 4, (values.abs() - mean).abs() + 1e-6),
    ):
        message = codec.encode(values)
        assert (message.dtype, message.nbytes) == (torch.uint8, nbytes)
        assert ((codec.decode(message, 3200) - values).abs() <= bound).all()
    with pytest.raises(ValueError, match="33"):
        compression.Int8().encode(values[:33])
    assert not compression.Int8().decode(compression.Int8().encode(torch.zeros(32)), 32).any()
    odd = compression.OneBit().encode(values[:13])
    assert torch.equal(compression.OneBit().decode(odd, 13).sign(), values[:13].sign())
    planes = torch.frombuffer(bytearray(zlib.decompress(compression.lossless(values, planes=True))), dtype=torch.uint8)
    assert torch.equal(planes.view(4, 3200).T.flatten(), values.view(torch.uint8))


def test_one_bit_needs_feedback_and_exact_messages_are_the_all_reduce(ranks):
    found = ranks(2).run(compression.compare_codecs, steps=10, names=("all-reduce", "exact"))[0]
    assert found["exact"]["losses"] == found["all-reduce"]["losses"]
    padded = found["all-reduce"]["sent_bytes"]["all_reduce"] / 4  # elements; N = 2, so one message each
    found = ranks(2).run(compression.compare_codecs, steps=60, names=("1 bit", "1 bit, feedback"))[0]
    assert found["1 bit, feedback"]["held_out"] < found["1 bit"]["held_out"] - 0.05
    assert found["1 bit"]["sent_bytes"]["all_gather"] == padded / 8 + 4 * 4  # a scale for each of four units


def gathers(stage, steps: int = 3) -> dict:
    """Bytes of gathers, parameters after steps, and the gap of what forward used to what the masters say, decoded."""
    model, used = byte_model(), {}
    zero = zeroify(model, momentum(model), stage)
    zero.model[3].register_forward_hook(lambda module, args, out: used.update(weight=module.weight.detach().clone()))
    train(model, zero.optimizer, steps, zero.rank, zero.world_size)
    with zero.full_params():
        master = model[3].weight.detach().clone()
    with torch.no_grad():
        model(batch(0)[0])
    codec = compression.Int8()
    flat = master.flatten()  # the weight comes first in its unit, and its size is a multiple of a block
    decoded = codec.decode(codec.encode(flat), flat.numel()).view_as(master)
    units = [(unit.P, unit.S) for unit in zero.units]
    sent = [(call.numel, call.itemsize) for call in zero.ledger if call.kind == "all_gather" and call.unit == "0"]
    return {
        "exact": gap(used["weight"], master),
        "rounded": gap(used["weight"], decoded),
        "sent": sent,
        "units": units,
        "parameters": parameters_of(model),
    }


def test_stage_3_gathers_8_bits_and_keeps_exact_masters(ranks):
    class SendsExactBytes(compression.QuantisedGathers):
        codec = compression.Cast()

    stages = (3, SendsExactBytes, compression.QuantisedGathers)
    plain, exact, quantised = (ranks(2).run(gathers, stage) for stage in stages)
    for a, b, c in zip(plain, exact, quantised):
        P, S = a["units"][0]
        assert set(a["sent"]) == {(P, 4)} and set(b["sent"]) == {(4 * P, 1)}
        assert set(c["sent"]) == {(2 * (S + 4 * S // compression.BLOCK), 1)}  # 1.125 bytes an element
        assert torch.equal(a["parameters"], b["parameters"])
        assert a["exact"] == 0 and c["rounded"] == 0 < c["exact"]
        assert 0 < gap(a["parameters"], c["parameters"]) < 1e-3
    assert torch.equal(quantised[0]["parameters"], quantised[1]["parameters"])


# --- sampling ---------------------------------------------------------------------------------


def sampled_step(p: float, rate: str) -> tuple[float, float, float, float]:
    """Gaps to torch DDP's step, times the factor, where sampled, and to no step elsewhere; part; bytes over all."""
    rank, N = dist.get_rank(), dist.get_world_size()
    model, plain = byte_model(), byte_model()
    before, ddp = parameters_of(plain), DistributedDataParallel(plain)
    loss_of(ddp, batch(0, rank, N)).backward()
    sampled = sampling.SampledUpdate(model, p, lr=0.5, rate=rate)
    train(model, sampled, 1, rank, N)
    expected = before - 0.5 * gradient_of(plain) * (1 / p if rate == "adaptive" else 1)
    part = sampling.sample(PSI, p, step=0)
    after = parameters_of(model)
    still = gap(after[~part], before[~part]) if p < 1 else 0.0
    return gap(after[part], expected[part]), still, part.float().mean().item(), sampled.sent_bytes / (4 * PSI)


@pytest.mark.parametrize("p, rate", [(1.0, "as it is"), (0.25, "as it is"), (0.25, "adaptive")])
def test_a_sampled_update_is_torch_ddps_where_it_updates_and_nothing_elsewhere(ranks, p, rate):
    for moved, still, part, sent in ranks(2).run(sampled_step, p, rate):
        assert moved < 1e-7 and still == 0
        assert part == pytest.approx(p, abs=0.01) and sent == pytest.approx(part, rel=1e-6)  # 2 Psi (N-1)/N is Psi


def test_sampling_changes_the_loss(ranks):
    found = ranks(2).run(sampling.compare_samples, steps=60, parts=(1.0, 0.1))[0]
    plain = found["torch DDP"]["held_out"]
    assert found["p = 1.0, as it is"]["gap"] == 0
    assert found["p = 0.1, as it is"]["held_out"] > plain + 0.1
    assert found["p = 0.1, adaptive"]["gap_after_one_step"] > 0.1
    assert found["p = 0.1, as it is"]["ever_sampled"] == pytest.approx(1 - 0.9**60, abs=0.01)
    with pytest.raises(ValueError, match="1.5"):
        sampling.sample(4, 1.5, 0)


# --- balance ----------------------------------------------------------------------------------


def test_unequal_shards_are_biased_by_means_and_right_by_weights(ranks):
    for N in (2, 4):
        for gaps in ranks(N).run(balance.compare_shards):
            for system in ("torch DDP", *STAGES):
                assert gaps[f"mean of means, {system}"] > 0.2 and gaps[f"weighted, {system}"] < 1e-6
        for found in ranks(N).run(balance.compare_tokens):
            assert found["weighted"] == pytest.approx(found["joint"], rel=1e-6)
            assert abs(found["mean of means"] - found["joint"]) > 1


def test_an_epoch_that_pads_or_drops_is_biased():
    found = balance.compare_samplers(examples=61, world_size=4)
    assert (found["padded, examples"], found["dropped, examples"]) == (3, -1)
    assert found["padded"] < found["plain"] - 1e-3 and found["dropped"] < found["plain"] - 1e-3  # easy ones twice
    whole = balance.compare_samplers(examples=60, world_size=4)
    assert whole["padded"] == whole["dropped"] == pytest.approx(whole["plain"], rel=1e-12)
