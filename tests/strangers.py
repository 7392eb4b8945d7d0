"""Models that others wrote, or write every day, tiny and with random weights: what test_strangers.py trains.

From Hugging Face: GPT-2, Llama, T5, ViT, and GPT-2 with a LoRA by peft. By hand, in the shapes of torchvision's (which
is another release for each torch): VisionTransformer, ResNet. Of torch's own layers: nn.Transformer, nn.LSTM.

All of this runs inside a rank, so that libraries are imported there.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.functional import cross_entropy

VOCABULARY, LENGTH, ROWS, CLASSES, D = 48, 8, 4, 5, 32
PIXELS, PATCH = 16, 4
NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}


@dataclass(frozen=True)
class Stranger:
    """A model, and how it is trained."""

    build: Callable[[], nn.Module]
    loss: Callable[[nn.Module, torch.Generator], torch.Tensor]  # of one batch, which it draws
    optimizer: Callable[[nn.Module], torch.optim.Optimizer]
    needs: tuple[str, ...] = ()  # packages
    unused: bool = False  # torch DDP's find_unused_parameters


# --- optimizers -------------------------------------------------------------------------------------------


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=0.01)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """As nanoGPT builds it: matrices decay, the rest does not."""
    params = {name: param for name, param in model.named_parameters() if param.requires_grad}
    groups = [
        {"params": [param for param in params.values() if param.dim() >= 2], "weight_decay": 0.1},
        {"params": [param for param in params.values() if param.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=0.01, betas=(0.9, 0.95))


def adamw_of_all(model: nn.Module) -> torch.optim.Optimizer:
    """Frozen parameters are in its group."""
    return torch.optim.AdamW(model.parameters(), lr=0.01)


# --- data -------------------------------------------------------------------------------------------------


def tokens(generator: torch.Generator, length: int = LENGTH) -> torch.Tensor:
    return torch.randint(3, VOCABULARY, (ROWS, length), generator=generator)  # 0 to 2: padding, begin and end


def images(generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    pixels = torch.randn(ROWS, 3, PIXELS, PIXELS, generator=generator)
    return pixels, torch.randint(CLASSES, (ROWS,), generator=generator)


# --- Hugging Face -----------------------------------------------------------------------------------------


def hugging_face():
    os.environ["HF_HUB_OFFLINE"] = "1"
    import transformers

    return transformers


def gpt2() -> nn.Module:
    hf = hugging_face()
    shape = {"vocab_size": VOCABULARY, "n_positions": 2 * LENGTH, "n_embd": D, "n_layer": 2, "n_head": 2}
    ends = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    return hf.GPT2LMHeadModel(hf.GPT2Config(**shape, **ends, **NO_DROPOUT))


def llama() -> nn.Module:
    hf = hugging_face()
    heads = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    ends = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    return hf.LlamaForCausalLM(
        hf.LlamaConfig(vocab_size=VOCABULARY, hidden_size=D, intermediate_size=2 * D, **heads, **ends)
    )


def t5() -> nn.Module:
    """Encoder and decoder share the embedding, which is the head as well.

    Eager attention: where T5 is checkpointed its bias needs a gradient, and torch's fused attention takes another
    kernel for that, with other bits.
    """
    hf = hugging_face()
    heads = {"num_layers": 2, "num_heads": 2, "dropout_rate": 0.0, "attn_implementation": "eager"}
    ends = {"decoder_start_token_id": 0, "pad_token_id": 0, "eos_token_id": 2}
    return hf.T5ForConditionalGeneration(
        hf.T5Config(vocab_size=VOCABULARY, d_model=D, d_kv=D // 2, d_ff=2 * D, **heads, **ends)
    )


def vit_config():
    shape = {"hidden_size": D, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 2 * D}
    dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return hugging_face().ViTConfig(image_size=PIXELS, patch_size=PATCH, num_labels=CLASSES, **shape, **dropout)


def vit() -> nn.Module:
    return hugging_face().ViTForImageClassification(vit_config())


def vit_features() -> nn.Module:
    """Its pooler makes an output that the loss does not look at."""
    return hugging_face().ViTModel(vit_config())


def gpt2_with_lora() -> nn.Module:
    os.environ["HF_HUB_OFFLINE"] = "1"
    import peft

    config = peft.LoraConfig(r=4, target_modules=["c_attn"], lora_dropout=0.0, init_lora_weights=False)
    return peft.get_peft_model(gpt2(), config)


def next_token(model: nn.Module, generator: torch.Generator) -> torch.Tensor:
    ids = tokens(generator)
    return model(input_ids=ids, labels=ids).loss


def translation(model: nn.Module, generator: torch.Generator) -> torch.Tensor:
    return model(input_ids=tokens(generator), labels=tokens(generator, LENGTH // 2), use_cache=False).loss


def labelled_images(model: nn.Module, generator: torch.Generator) -> torch.Tensor:
    pixels, labels = images(generator)
    return model(pixel_values=pixels, labels=labels).loss


def mean_feature(model: nn.Module, generator: torch.Generator) -> torch.Tensor:
    return model(pixel_values=images(generator)[0]).last_hidden_state[:, 1:].mean(1).square().mean()


# --- the shapes of torchvision's --------------------------------------------------------------------------


class EncoderBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(D), nn.LayerNorm(D)
        self.self_attention = nn.MultiheadAttention(D, 2, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(D, 2 * D), nn.GELU(), nn.Linear(2 * D, D))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.ln_1(x)
        x = x + self.self_attention(h, h, h, need_weights=False)[0]
        return x + self.mlp(self.ln_2(x))


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.pos_embedding = nn.Parameter(torch.randn(1, 1 + (PIXELS // PATCH) ** 2, D) * 0.02)
        self.layers = nn.Sequential(*[EncoderBlock() for _ in range(2)])
        self.ln = nn.LayerNorm(D)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.ln(self.layers(x + self.pos_embedding))


class VisionTransformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.class_token = nn.Parameter(torch.zeros(1, 1, D))
        self.conv_proj = nn.Conv2d(3, D, PATCH, PATCH)
        self.encoder = Encoder()
        self.heads = nn.Sequential(nn.Linear(D, D), nn.Tanh(), nn.Linear(D, CLASSES))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.conv_proj(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.class_token.expand(len(x), -1, -1), x], dim=1)
        return self.heads(self.encoder(x)[:, 0])


class BasicBlock(nn.Module):
    def __init__(self, inside: int, planes: int, stride: int):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(inside, planes, 3, stride, 1, bias=False), nn.BatchNorm2d(planes)
        self.conv2, self.bn2 = nn.Conv2d(planes, planes, 3, 1, 1, bias=False), nn.BatchNorm2d(planes)
        self.relu, self.downsample = nn.ReLU(inplace=True), None
        if stride != 1:
            shortcut = nn.Conv2d(inside, planes, 1, stride, bias=False)
            self.downsample = nn.Sequential(shortcut, nn.BatchNorm2d(planes))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        identity = x if self.downsample is None else self.downsample(x)
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        out += identity
        return self.relu(out)


class ResNet(nn.Module):
    """resnet18, an eighth as wide."""

    def __init__(self, width: int = 8):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, width, 7, 2, 3, bias=False), nn.BatchNorm2d(width)
        self.relu, self.maxpool = nn.ReLU(inplace=True), nn.MaxPool2d(3, 1, 1)
        self.layer1 = self.layer(width, width, 1)
        self.layer2 = self.layer(width, 2 * width, 2)
        self.layer3 = self.layer(2 * width, 4 * width, 2)
        self.layer4 = self.layer(4 * width, 8 * width, 2)
        self.avgpool, self.fc = nn.AdaptiveAvgPool2d(1), nn.Linear(8 * width, CLASSES)

    def layer(self, inside: int, planes: int, stride: int) -> nn.Sequential:
        return nn.Sequential(BasicBlock(inside, planes, stride), BasicBlock(planes, planes, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        return self.fc(self.avgpool(x).flatten(1))


def classification(model: nn.Module, generator: torch.Generator) -> torch.Tensor:
    pixels, labels = images(generator)
    return cross_entropy(model(pixels), labels)


# --- torch's own layers -----------------------------------------------------------------------------------


class Translator(nn.Module):
    def __init__(self):
        super().__init__()
        self.source, self.target = nn.Embedding(VOCABULARY, D), nn.Embedding(VOCABULARY, D)
        self.transformer = nn.Transformer(D, 2, 2, 2, 2 * D, dropout=0.0, batch_first=True)
        self.out = nn.Linear(D, VOCABULARY)

    def forward(self, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        mask = self.transformer.generate_square_subsequent_mask(target.shape[1])
        hidden = self.transformer(self.source(source), self.target(target), tgt_mask=mask, tgt_is_causal=True)
        return self.out(hidden)


class LastWord(nn.Module):
    """The head's last block makes the model's output."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, D)
        self.lstm = nn.LSTM(D, D, num_layers=2, batch_first=True)
        self.head = nn.Sequential(nn.Linear(D, D), nn.ReLU(), nn.Linear(D, CLASSES))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        _, (hidden, _) = self.lstm(self.embed(ids))
        return self.head(hidden[-1])


def translated(model: nn.Module, generator: torch.Generator) -> torch.Tensor:
    source, target = tokens(generator), tokens(generator)
    return cross_entropy(model(source, target[:, :-1]).flatten(0, 1), target[:, 1:].flatten())


def classified_words(model: nn.Module, generator: torch.Generator) -> torch.Tensor:
    ids = tokens(generator)
    return cross_entropy(model(ids), ids.sum(1) % CLASSES)


HF, PEFT = ("transformers",), ("transformers", "peft")
LANGUAGE = {
    "GPT-2": Stranger(gpt2, next_token, adamw, HF),
    "Llama": Stranger(llama, next_token, adamw, HF),
    "T5": Stranger(t5, translation, adamw, HF),
}
LORA = Stranger(gpt2_with_lora, next_token, adamw_of_all, PEFT)
STRANGERS = LANGUAGE | {
    "ViT": Stranger(vit, labelled_images, adamw, HF),
    "ViT without its pooler": Stranger(vit_features, mean_feature, adamw, HF, unused=True),
    "LoRA on GPT-2": LORA,
    "VisionTransformer": Stranger(VisionTransformer, classification, adamw),
    "ResNet": Stranger(ResNet, classification, sgd),
    "nn.Transformer": Stranger(Translator, translated, adamw),
    "nn.LSTM": Stranger(LastWord, classified_words, sgd),
}
