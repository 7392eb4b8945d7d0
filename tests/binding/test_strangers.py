"""Models that others wrote train at every stage as torch DDP trains them, to the bit, and keep their libraries' habits.

Two ranks on gloo, other data on each, three steps. What a habit leaves (tokens, files, a GAN's losses) is what torch
DDP's model leaves. A test that needs a package which is not here is skipped: `pip install -e ".[strangers]"`.
"""

import contextlib
import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from parity import copies_of, exactly
from strangers import LANGUAGE, LENGTH, LORA, ROWS, STRANGERS, D, Stranger, tokens
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy, kl_div
from torch.nn.parallel import DistributedDataParallel

from zero_mini.ddp import DDP
from zero_mini.zeroify import zeroify

STAGES = (0, 1, 2, 3)
TORCH = None  # in place of a stage: torch DDP


@dataclass
class Trained:
    """What a run leaves."""

    model: nn.Module
    zero: DDP | None
    start: dict[str, torch.Tensor]
    seen: list[torch.Tensor] = field(default_factory=list)  # losses, and what a habit looked at
    state: dict[str, torch.Tensor] = field(default_factory=dict)


def wrap(model: nn.Module, optimizer: torch.optim.Optimizer, stage: int | None, unused: bool = False):
    """(what to call, the handle): torch DDP or the model itself."""
    if stage is TORCH:
        return DistributedDataParallel(model, find_unused_parameters=unused), None
    return model, zeroify(model, optimizer, stage=stage)


def average_by_hand(model: nn.Module) -> None:
    """What torch DDP does, for a model whose modules are called by themselves."""
    for param in model.parameters():
        if param.grad is not None:
            param.grad /= dist.get_world_size()
            dist.all_reduce(param.grad)


def draw(step: int) -> torch.Generator:
    return torch.Generator().manual_seed(100 * dist.get_rank() + step)


def train(
    stranger: Stranger,
    stage: int | None,
    prepare: Callable[[nn.Module], None] = lambda model: None,
    in_parts: bool = False,
    after_step: Callable[[Trained], None] = lambda run: None,
) -> Trained:
    torch.manual_seed(dist.get_rank())  # rank 0's weights count
    model = stranger.build()
    prepare(model)
    model.train()
    optimizer = stranger.optimizer(model)
    if in_parts and stage is TORCH:
        called, zero = model, None
        for tensor in model.state_dict().values():
            dist.broadcast(tensor, 0)
        optimizer.register_step_pre_hook(lambda *_: average_by_hand(model))
    else:
        called, zero = wrap(model, optimizer, stage, stranger.unused)
    run = Trained(model, zero, copies_of(model.state_dict()))
    for step in range(3):
        loss = stranger.loss(called, draw(step))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        run.seen.append(loss.detach())
        after_step(run)
    run.state = copies_of(model.state_dict())
    return run


def differences(label: str, one: Trained, other: Trained) -> list[str]:
    found = [
        f"{label}: {i} of what was seen" for i, (a, b) in enumerate(zip(one.seen, other.seen)) if not torch.equal(a, b)
    ]
    if (len(one.seen), list(one.state)) != (len(other.seen), list(other.state)):
        found.append(f"{label}: other names")
    found += [f"{label}: {name}" for name in one.state if not torch.equal(one.state[name], other.state[name])]
    if all(torch.equal(one.state[name], one.start[name]) for name in one.start):
        found.append(f"{label}: nothing was trained")
    return found


def against_torch(run: Callable[..., Trained]) -> list[str]:
    """run(stage) at every stage and with torch DDP: what differs on this rank."""
    with exactly():
        expected = run(TORCH)
        return [line for stage in STAGES for line in differences(f"stage {stage}", run(stage), expected)]


def skip_without(stranger: Stranger) -> None:
    for package in stranger.needs:
        pytest.importorskip(package)


@pytest.mark.parametrize("name", STRANGERS)
def test_a_stranger_trains_as_torch_ddp_trains_it(ranks, name):
    skip_without(STRANGERS[name])
    assert ranks(2).run(lambda: against_torch(lambda stage: train(STRANGERS[name], stage))) == [[], []]


def averaged(stage: int | None) -> Trained:
    """An exponential moving average of the weights, by a loop over two lists of parameters."""
    average: list[torch.Tensor] = []

    def follow(run: Trained) -> None:
        with contextlib.nullcontext() if run.zero is None else run.zero.full_params():
            if not average:
                average.extend(torch.zeros_like(param) for param in run.model.parameters())
            for mean, param in zip(average, run.model.parameters()):
                mean.mul_(0.9).add_(param.detach(), alpha=0.1)

    run = train(STRANGERS["VisionTransformer"], stage, after_step=follow)
    run.seen += average
    return run


def test_an_average_of_the_weights_under_full_params_is_the_average_of_torch_ddps(ranks):
    assert ranks(2).run(lambda: against_torch(averaged)) == [[], []]


# --- Hugging Face's habits --------------------------------------------------------------------------------


def generate_and_save(stranger: Stranger, folder: Path, stage: int | None) -> Trained:
    run = train(stranger, stage)
    run.model.eval()
    prompt = tokens(draw(50), 4)
    run.seen.append(run.model.generate(prompt, max_new_tokens=5, min_new_tokens=5, do_sample=False))
    if run.zero is not None:
        with run.zero.full_params():
            if dist.get_rank() == 0:
                run.model.save_pretrained(folder)
        dist.barrier()
        run.state = copies_of(type(run.model).from_pretrained(folder).state_dict())
    return run


@pytest.mark.parametrize("name", LANGUAGE)
def test_a_language_model_generates_and_is_saved_as_torch_ddps_model(ranks, name, tmp_path):
    skip_without(LANGUAGE[name])

    def run(stage):
        return generate_and_save(LANGUAGE[name], tmp_path / str(stage), stage)

    assert ranks(2).run(lambda: against_torch(run)) == [[], []]


@pytest.mark.parametrize("name", LANGUAGE)
def test_gradient_checkpointing_changes_no_bit(ranks, name):
    skip_without(LANGUAGE[name])

    def run(stage):
        checkpoint = (lambda model: None) if stage is TORCH else (lambda model: model.gradient_checkpointing_enable())
        return train(LANGUAGE[name], stage, checkpoint)

    assert ranks(2).run(lambda: against_torch(run)) == [[], []]


def tuned_beside_its_base(stage: int | None) -> Trained:
    """A LoRA whose loss looks at what the model says without it, as RLHF does."""
    torch.manual_seed(dist.get_rank())
    model = LORA.build()
    optimizer = LORA.optimizer(model)
    called, zero = wrap(model, optimizer, stage)
    run = Trained(model, zero, copies_of(model.state_dict()))
    for step in range(3):
        ids = tokens(draw(step))
        with torch.no_grad(), model.disable_adapter():
            base = called(input_ids=ids).logits
        out = called(input_ids=ids, labels=ids)
        loss = out.loss + kl_div(out.logits.log_softmax(-1), base.log_softmax(-1), log_target=True)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        run.seen += [loss.detach(), base]
    run.state = copies_of(model.state_dict())
    return run


def test_a_lora_is_tuned_beside_its_base(ranks):
    skip_without(LORA)
    assert ranks(2).run(lambda: against_torch(tuned_beside_its_base)) == [[], []]


# --- modules called by themselves -------------------------------------------------------------------------


def encoded(t5: nn.Module, generator: torch.Generator) -> torch.Tensor:
    return t5.get_encoder()(input_ids=tokens(generator)).last_hidden_state.square().mean()


def encoded_then_decoded(t5: nn.Module, generator: torch.Generator) -> torch.Tensor:
    seen = t5.encoder(input_ids=tokens(generator))
    return t5(encoder_outputs=seen, labels=tokens(generator), use_cache=False).loss


def body_then_head(gpt2: nn.Module, generator: torch.Generator) -> torch.Tensor:
    ids = tokens(generator)
    hidden = gpt2.transformer(input_ids=ids).last_hidden_state
    return cross_entropy(gpt2.lm_head(hidden).flatten(0, 1), ids.flatten())


def from_its_embeddings(gpt2: nn.Module, generator: torch.Generator) -> torch.Tensor:
    ids = tokens(generator)
    out = gpt2(inputs_embeds=gpt2.get_input_embeddings()(ids), labels=ids, output_hidden_states=True)
    return out.loss + sum(hidden.square().mean() for hidden in out.hidden_states)


def attention_alone(vit: nn.Module, generator: torch.Generator) -> torch.Tensor:
    x = torch.randn(ROWS, LENGTH, D, generator=generator)
    return vit.encoder.layers[0].self_attention(x, x, x)[0].square().mean()


def source_alone(translator: nn.Module, generator: torch.Generator) -> torch.Tensor:
    ids = tokens(generator)
    padding = torch.arange(LENGTH).expand(ROWS, -1) >= LENGTH // 2
    hidden = translator.transformer.encoder(translator.source(ids), src_key_padding_mask=padding)
    return hidden[~padding].square().mean()


def recurrent_alone(last_word: nn.Module, generator: torch.Generator) -> torch.Tensor:
    last_word.lstm.flatten_parameters()
    return last_word.lstm(last_word.embed(tokens(generator)))[0].square().mean()


PARTS = {
    "T5's encoder": ("T5", encoded),
    "T5's encoder, then all of it": ("T5", encoded_then_decoded),
    "GPT-2's body, then its head": ("GPT-2", body_then_head),
    "GPT-2's embedding, then all of it": ("GPT-2", from_its_embeddings),
    "an attention": ("VisionTransformer", attention_alone),
    "nn.TransformerEncoder": ("nn.Transformer", source_alone),
    "nn.LSTM": ("nn.LSTM", recurrent_alone),
}


@pytest.mark.parametrize("part", PARTS)
def test_a_part_called_by_itself_is_trained(ranks, part):
    name, loss = PARTS[part]
    skip_without(STRANGERS[name])
    stranger = replace(STRANGERS[name], loss=loss)
    assert ranks(2).run(lambda: against_torch(lambda stage: train(stranger, stage, in_parts=True))) == [[], []]


# --- two models at once -----------------------------------------------------------------------------------


def two_layers(inside: int, outside: int) -> nn.Module:
    return nn.Sequential(
        nn.Linear(inside, D), nn.LeakyReLU(0.2), nn.Linear(D, D), nn.LeakyReLU(0.2), nn.Linear(D, outside)
    )


def gan(stage: int | None) -> Trained:
    torch.manual_seed(dist.get_rank())
    models = nn.ModuleDict({"generator": two_layers(4, 8), "discriminator": two_layers(8, 1)})
    optimizers = {
        name: torch.optim.Adam(model.parameters(), lr=0.01, betas=(0.5, 0.9)) for name, model in models.items()
    }
    start = copies_of(models.state_dict())
    called = {name: wrap(model, optimizers[name], stage)[0] for name, model in models.items()}
    run = Trained(models, None, start)

    def verdict(x: torch.Tensor, real: bool) -> torch.Tensor:
        judged = called["discriminator"](x)
        return binary_cross_entropy_with_logits(judged, torch.full_like(judged, float(real)))

    for step in range(3):
        noise, real = torch.randn(6, 4, generator=draw(step)), torch.randn(6, 8, generator=draw(step + 50))
        loss = verdict(real, True) + verdict(called["generator"](noise).detach(), False)
        loss.backward()
        optimizers["discriminator"].step()
        optimizers["discriminator"].zero_grad()
        models["discriminator"].requires_grad_(False)
        fooled = verdict(called["generator"](noise), True)
        fooled.backward()
        optimizers["generator"].step()
        optimizers["generator"].zero_grad()
        models["discriminator"].requires_grad_(True)
        run.seen += [loss.detach(), fooled.detach()]
    run.state = copies_of(models.state_dict())
    return run


def test_a_gan_trains_as_torch_ddp_trains_it(ranks):
    assert ranks(2).run(lambda: against_torch(gan)) == [[], []]


# --- loops of others --------------------------------------------------------------------------------------


def gpt2_and_data():
    torch.manual_seed(0)
    rows = [torch.arange(LENGTH) + first for first in range(32)]
    return STRANGERS["GPT-2"].build(), [{"input_ids": row, "labels": row} for row in rows]


def with_accelerate(stage: int | None) -> list[float]:
    from accelerate import Accelerator

    model, data = gpt2_and_data()
    accelerator = Accelerator(cpu=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    loader = accelerator.prepare(torch.utils.data.DataLoader(data, batch_size=4))
    if stage is TORCH:
        model, optimizer = accelerator.prepare(model, optimizer)
    else:
        zeroify(model, optimizer, stage=stage)
        model = accelerator.prepare_model(model, evaluation_mode=True)
    losses = []
    for batch in loader:
        loss = model(**batch).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def with_trainer(stage: int | None) -> list[float]:
    from transformers import Trainer, TrainingArguments

    class ZeroTrainer(Trainer):
        def create_accelerator_and_postprocess(self):
            super().create_accelerator_and_postprocess()
            self.accelerator.prepare_model = partial(self.accelerator.prepare_model, evaluation_mode=True)

        def create_optimizer(self, model=None):
            super().create_optimizer(model)
            self.zero = zeroify(self.model, self.optimizer, stage=stage)
            return self.optimizer

        def _clip_grad_norm(self, model):
            return self.zero.clip_grad_norm_(self.args.max_grad_norm)

        def _get_grad_norm(self, model, grad_norm=None):
            return grad_norm

    model, data = gpt2_and_data()
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            max_steps=4,
            per_device_train_batch_size=4,
            learning_rate=0.01,
            max_grad_norm=0.5,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
        )
        trainer = (Trainer if stage is TORCH else ZeroTrainer)(model=model, args=arguments, train_dataset=data)
        trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


@pytest.mark.parametrize("loop", [with_accelerate, with_trainer])
def test_a_loop_of_others_trains_as_with_torch_ddp(ranks, loop):
    pytest.importorskip("accelerate")
    pytest.importorskip("transformers")

    def losses() -> list[list[float]]:
        os.environ.setdefault("LOCAL_RANK", str(dist.get_rank()))  # as torchrun sets it
        return [loop(stage) for stage in (TORCH, *STAGES)]

    for expected, *stages in ranks(2).run(losses):
        assert len(expected) == 4 and expected[-1] < expected[0]
        assert all(own == pytest.approx(expected, rel=1e-5) for own in stages)
