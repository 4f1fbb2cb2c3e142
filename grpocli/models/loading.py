"""The config group `model`: its common keys, model=hf, and loading models and tokenizers from a folder or the hub."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import MISSING

from grpocli.chat_clock import DAY, stop_clock
from grpocli.config.parts import one_of, part, require, section
from grpocli.config.user_code import too_little_memory
from grpocli.errors import ConfigError
from grpocli.hub import PREFIX, check_folder, model_folder, why_unreachable
from grpocli.models import lora
from grpocli.models.chat_template import arguments_of, end_of_turn
from grpocli.models.lora import Lora
from grpocli.models.quantization import NF4, check_bitsandbytes
from grpocli.types import DTYPES

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from grpocli.config.schema import Run

Progress = Callable[[float, str], None]
"""Called with a fraction from 0 to 1 and a phrase for the user."""


FLEX = "flex_attention"
"""Value of model.attention with which packed rows use torch's flex attention, and other rows `sdpa`."""
ATTENTIONS = ("sdpa", "eager", FLEX, *(f"flash_attention_{version}" for version in (2, 3, 4)))
"""Values of model.attention beside kernels of the hub, which are `OWNER/NAME`."""
UNFIT_FOR_FLOAT16 = ("gemma2", "gemma3_text", "glm4")
"""Types of language models that vLLM refuses in float16, because their activations leave its range."""
PACKING = (None, "sdpa", FLEX)
"""Values of model.attention with which rows are packed."""


def takes_flex(attention: str | None, gpu: bool) -> bool:
    """Whether packed rows try flex attention, with `model.attention`."""
    return attention == FLEX or (attention is None and gpu)


@section("model")
class ModelPart:
    """Base class of the config group `model`."""

    dtype: str = "auto"
    """Dtype of the computation: `float32`, `bfloat16`, `float16`, which rounds less and needs a scaled loss, or `auto`,
    the fastest one on this machine; of equally fast ones `bfloat16`."""
    head_dtype: str | None = None
    """Dtype of logits, in the trainer and in vLLM alike: `float32`, products in float32 of hidden states and weights in
    model.dtype; null: logits rounded to model.dtype, which is faster and less exact."""
    attention: str | None = None
    """Attention of transformers, such as `sdpa` or `flash_attention_2`; `flex_attention`: one call a layer for packed
    rows; null: that on a GPU, where its trial passes, otherwise the default of transformers."""
    compile: bool | None = None
    """Compile decoder layers with torch.compile: the start takes longer, an update may take less; null: on a GPU, from
    100 million parameters on, where flex attention is used and each process has all weights."""
    lora: Lora = Lora()
    """Low-rank updates, which train instead of all weights if lora.rank is above 0."""
    quantization: str | None = None
    """Weights of the frozen model below LoRA: `nf4`, 4.5 bits each (QLoRA, arXiv 2305.14314); null: float32."""

    def __post_init__(self) -> None:
        require(self, "quantization", self.quantization in (None, NF4), f"choose {NF4}, or null for whole weights")
        one_of(self, "dtype", ("auto", *DTYPES))
        if self.attention is not None and "/" not in self.attention:
            one_of(self, "attention", ATTENTIONS)
        require(self, "head_dtype", self.head_dtype in (None, "float32"), "choose float32, or null for model.dtype")

    def prepare(self, progress: Progress | None = None) -> str:
        """The folder of the model, or its id on the hub; makes or fetches what it needs."""
        raise NotImplementedError

    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer alone; no weights are made or fetched."""
        return load_tokenizer(self, self.prepare())

    def end_ids(self, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
        """The tokens that end a completion, see `end_token_ids`; no weights are made or fetched."""
        return end_token_ids(None, tokenizer)

    def check_run(self, run: Run) -> None:
        """Require, for quantized or compiled layers and for LoRA, a way to share the model that can have them."""
        parallel, lora = run.hardware.parallel, self.lora.rank > 0
        problem = "LoRA's updates cannot be added to sharded weights: take fsdp2 or ddp"
        require(run.hardware, "parallel", not (lora and parallel == "zero3"), problem)
        if self.quantization:
            require(self, "quantization", lora, "its weights do not train: add model.lora.rank=16")
            require(self, "quantization", parallel == "ddp", f"hardware.parallel={parallel} shards whole weights")
            problem = "a moving reference (algorithm.kl.sync_every) is a copy with whole weights: leave one of them out"
            require(self, "quantization", run.algorithm.kl.sync_every == 0, problem)
            require(self, "compile", not self.compile, "torch cannot compile layers of 4 bits (model.quantization)")
        problem = f"DeepSpeed's hooks (hardware.parallel={parallel}) would be compiled, too: take ddp or fsdp2"
        require(self, "compile", not (self.compile and parallel.startswith("zero")), problem)

    def check_ready(self) -> None:
        """Raise ConfigError if a library that the keys need is not installed. Loads no slow library."""
        if self.quantization:
            check_bitsandbytes("model.quantization", self.quantization)


@part("model", "hf")
class HuggingFace(ModelPart):
    """A language model of transformers, from a folder or the hub."""

    path: str = MISSING
    """A folder with config.json, weights and tokenizer, or a name on the hub; `hub:OWNER/NAME@REVISION` takes only
    safetensors."""
    revision: str | None = None
    """Branch, tag or commit on the hub; null: the default branch."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model."""
    chat_template: str | None = None
    """File with a Jinja template that replaces the tokenizer's own; null: the tokenizer's."""
    chat_template_arguments: dict[str, Any] = field(default_factory=dict)
    """Variables that the template reads beside the messages: `model.chat_template_arguments.enable_thinking=false`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self, "path", self.path not in ("", MISSING), "give model.path=FOLDER or a name on the hub")
        file = Path(self.chat_template or "").expanduser()
        require(self, "chat_template", self.chat_template is None or file.is_file(), "there is no such file")

    def prepare(self, progress: Progress | None = None) -> str:
        """The absolute path of the folder, or the hub id."""
        self.check_ready()
        if self.path.startswith(PREFIX):
            return model_folder(self.path, "model.path", self.revision)
        folder = Path(self.path).expanduser()
        return str(folder.resolve()) if folder.is_dir() else self.path

    def end_ids(self, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
        """The tokens that end a completion, those of the generation config among them."""
        return end_token_ids(configured_end_ids(self, self.prepare()), tokenizer)

    def check_ready(self) -> None:
        """Raise ConfigError if there is no such model. Loads no slow library."""
        super().check_ready()
        folder = Path(self.path).expanduser()
        is_adapter = (folder / lora.CONFIG).is_file() and not (folder / "config.json").is_file()
        require(self, "path", not is_adapter, "is an adapter, not a model", "give it as model.lora.path")
        check_folder("model.path", self.path)
        if not self.path.startswith(PREFIX) and not folder.is_dir() and (reason := why_unreachable()):
            from huggingface_hub import try_to_load_from_cache

            cached = isinstance(try_to_load_from_cache(self.path, "config.json", revision=self.revision), str)
            require(self, "path", cached, f"there is no such folder, and the hub does not answer ({reason})")


def load_model(part: Any, path: str) -> PreTrainedModel:
    """The causal language model at `path` with float32 weights, on the CPU, in evaluation mode.

    part: the run's choice of `model`; path: the return value of its `prepare`, or a checkpoint's folder.
    Raises ConfigError if transformers cannot load it, or would initialise weights at random.
    """
    import torch

    return with_head(part, _load(part, path, dtype=torch.float32))


def load_quantized(part: Any, path: str, dtype: str, device: Any = "cpu") -> PreTrainedModel:
    """The model at `path` with linear layers of `model.quantization`, and other weights in `dtype`.

    dtype: of the computation. Weights are quantized on `device`, one by one. Raises ConfigError as `load_model` does.
    """
    import torch
    from transformers import BitsAndBytesConfig

    from grpocli.models.frozen_linear import as_plain

    # every linear layer but the output head
    config = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type=NF4, bnb_4bit_use_double_quant=False)
    loading = {"quantization_config": config, "device_map": {"": device}}
    return with_head(part, as_plain(_load(part, path, dtype=getattr(torch, dtype), **loading)))


def _load(part: Any, path: str, **loading: Any) -> PreTrainedModel:
    from transformers import AutoModelForCausalLM

    options = _options(part, path)
    if part.attention is not None:
        options["attn_implementation"] = "sdpa" if part.attention == FLEX else part.attention
    with _explained(path, "model"):
        model: PreTrainedModel
        model, found = AutoModelForCausalLM.from_pretrained(
            path, output_loading_info=True, ignore_mismatched_sizes=True, **loading, **options
        )
    for what, names in (("no weights", found["missing_keys"]), ("weights of another shape", found["mismatched_keys"])):
        if names:
            first = min(name if isinstance(name, str) else name[0] for name in names)
            raise ConfigError(f"has {what} for {first}, see config.json", key="model.path", value=path)
    if part.attention in (None, FLEX) and getattr(model.config.get_text_config(), "attn_logit_softcapping", None):
        model.set_attn_implementation("eager")  # sdpa ignores the cap (Gemma 2), which vLLM has
    return model


def choose_head_dtype(part: Any, dtype: str) -> str | None:
    """The dtype of the output head if it differs from `dtype`, that of the computation; else None."""
    head_dtype: str | None = getattr(part, "head_dtype", None)
    return None if dtype == head_dtype else head_dtype


def with_head(part: Any, model: PreTrainedModel) -> PreTrainedModel:
    """The same model with the output head of `model.head_dtype`."""
    if choose_head_dtype(part, part.dtype):
        from grpocli.models.head import widen_head

        widen_head(model)
    return model


def load_policy(
    part: Any, base: str, path: str, seed: int, dtype: str = "float32", device: Any = "cpu"
) -> PreTrainedModel:
    """The model to train, without dropout. path: `base`, or the checkpoint to resume from, with LoRA only its updates.

    dtype, device: as of `load_quantized`. Raises ConfigError if `model.lora` and the checkpoint do not match.
    """
    if path != base:
        lora.check_same(part.lora, Path(path))
    if not part.lora.rank:
        return without_dropout(load_model(part, path))
    model = load_quantized(part, base, dtype, device) if part.quantization else load_model(part, base)
    model = lora.attach(without_dropout(model), part.lora, seed)
    if start := part.lora.path if path == base else path:
        is_there = start == path or (Path(start).expanduser() / lora.WEIGHTS).is_file()
        require(part.lora, "path", is_there, f"has no {lora.WEIGHTS}; give the folder of an adapter")
        lora.load_adapter(model, part.lora, Path(start).expanduser())
    return model


def load_config(part: Any, path: str) -> Any:
    """The config at `path`, with the options of `load_model`."""
    from transformers import AutoConfig

    with _explained(path, "config"):
        return AutoConfig.from_pretrained(path, **_options(part, path))


def language_model_class(part: Any, path: str) -> str | None:
    """The class of the language model if transformers loads it without those beside it (Qwen3.5); else None.

    So should vLLM; where transformers loads them together (Gemma 3), it does so too.
    """
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    config = load_config(part, path)
    name = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(config.model_type)
    together = config.get_text_config() is config or name in (config.architectures or [name])
    return None if together else name


def model_without_weights(part: Any, path: str) -> PreTrainedModel:
    """The model at `path` on torch's meta device, from its config alone."""
    from accelerate import init_empty_weights
    from transformers import AutoModelForCausalLM

    config = load_config(part, path)
    trusts = getattr(part, "trust_remote_code", False)
    with _explained(path, "config"), init_empty_weights():
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, trust_remote_code=trusts)
    return model


def without_dropout(model: PreTrainedModel) -> PreTrainedModel:
    """The model with dropout off: the sampler has none, and different dropout masks would distort policy ratios."""
    import torch

    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
        for name, value in list(vars(module).items()):
            if "drop" in name and isinstance(value, float):  # `dropout`, `attention_dropout`, `layerdrop` ...
                setattr(module, name, 0.0)
    return model


def checkpoint_activations(model: PreTrainedModel) -> None:
    """Compute activations again in the backward pass instead of keeping them."""  # transformers 5.24 renames it
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": False})


def load_tokenizer(part: Any, path: str) -> PreTrainedTokenizerBase:
    """The tokenizer at `path`; if it lacks a padding token, the end token serves as one."""
    from transformers import AutoTokenizer

    with _explained(path, "tokenizer"):
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(path, **_options(part, path))
    if tokenizer.eos_token_id is None:
        raise ConfigError("its tokenizer has no end token, so no completion could end", key="model.path", value=path)
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    if template := getattr(part, "chat_template", None):
        tokenizer.chat_template = Path(template).expanduser().read_text(encoding="utf-8")
    stop_clock(tokenizer, DAY)
    if arguments := arguments_of(part, tokenizer):  # for every part of the run that renders a conversation
        tokenizer.__dict__["apply_chat_template"] = partial(tokenizer.apply_chat_template, **arguments)
    return tokenizer


def check_vocabulary(part: Any, path: str) -> None:
    """Raise ConfigError if a token has no row in the embedding; those for padding and images are in no row of data."""
    tokenizer, rows = load_tokenizer(part, path), load_config(part, path).get_text_config().vocab_size
    unused = {tokenizer.pad_token, getattr(tokenizer, "image_token", None)} - {tokenizer.eos_token}
    if (tokens := max(number for token, number in tokenizer.get_vocab().items() if token not in unused) + 1) > rows:
        problem = f"its tokenizer has {tokens:,} tokens, and its embedding {rows:,} rows"
        hint = "save the model after model.resize_token_embeddings, or give the model's own tokenizer"
        raise ConfigError(problem, key="model.path", value=path, hint=hint)


def configured_end_ids(part: Any, path: str) -> int | list[int] | None:
    """The end tokens in the generation config of the model at `path`, or in its config if it has no other."""
    from transformers import GenerationConfig

    found: int | list[int] | None = load_config(part, path).get_text_config().eos_token_id
    with suppress(OSError, ValueError):  # the model has none
        found = GenerationConfig.from_pretrained(path, **_options(part, path)).eos_token_id
    return found


def end_token_ids(configured: int | list[int] | None, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """The tokens that end a completion: those of the generation config, the tokenizer and the chat template.

    A family may name it in one of them only: Gemma in its generation config, base models of Qwen in their template.
    """
    ids = configured if isinstance(configured, list) else [configured]
    every = [*ids, tokenizer.eos_token_id, end_of_turn(tokenizer)]
    return frozenset(one for one in every if isinstance(one, int))


def _options(part: Any, path: str) -> dict[str, Any]:
    options: dict[str, Any] = {"trust_remote_code": getattr(part, "trust_remote_code", False)}
    if not Path(path).is_dir():
        options["revision"] = getattr(part, "revision", None)
    return options


@contextmanager
def _explained(path: str, what: str) -> Iterator[None]:
    """Turn errors of transformers and the hub into a ConfigError with their first line."""
    try:
        yield
    except Exception as error:
        if short := too_little_memory(error):
            raise short from error
        cause = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
        raise ConfigError(f"cannot load the {what}: {cause.rstrip('.')}", key="model.path", value=path) from error


LARGE = 20_000_000
"""Parameters above which bfloat16 is faster on a CPU that supports it; below, casts cost more than they save."""


def choose_dtype(dtype: str, part: Any, model_path: str, device: str) -> str:
    """One of DTYPES for `model.dtype` (`auto`, or one of them), without loading the weights.

    part: the run's choice of `model`. Raises ConfigError if its config cannot be loaded.
    auto: bfloat16 on a GPU that has it, otherwise float16, or float32 for UNFIT_FOR_FLOAT16; on a CPU with bfloat16
    instructions bfloat16 for models over 20 M parameters, otherwise float32.
    """
    if dtype != "auto":
        return dtype
    import torch

    if device != "cpu" and torch.cuda.is_available():
        if torch.cuda.is_bf16_supported(including_emulation=False):
            return "bfloat16"
        kind = load_config(part, model_path).get_text_config().model_type
        return "float32" if kind in UNFIT_FOR_FLOAT16 else "float16"
    if not cpu_has_bfloat16(Path("/proc/cpuinfo")):
        return "float32"
    parameters = sum(one.numel() for one in model_without_weights(part, model_path).parameters())
    return "bfloat16" if parameters > LARGE else "float32"


def cpu_has_bfloat16(cpuinfo: Path) -> bool:
    """Whether the CPU has instructions for matrix products in bfloat16."""
    return cpuinfo.is_file() and any(flag in cpuinfo.read_text() for flag in ("avx512_bf16", "amx_bf16", "bf16 "))
