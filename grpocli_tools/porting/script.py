"""A training script read as syntax: `GRPOConfig(...)`, `GRPOTrainer(...)`, its model, rewards and LoRA."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from pathlib import Path

from grpocli.errors import ConfigError
from grpocli_tools.porting.command_line import given_arguments, last_name
from grpocli_tools.porting.foreign_names import TOKENIZER
from grpocli_tools.porting.script_data import DataReader
from grpocli_tools.porting.source import FROM_COMMAND_LINE, RewardCall, ScriptSource, Unread, add_arguments
from grpocli_tools.porting.syntax import TOO_DEEP, Function, Scope, parsed

POSITIONS = ("model", "reward_funcs", "args", "train_dataset", "eval_dataset", "processing_class")
"""Arguments of GRPOTrainer that are given by position."""
MOVES = ("to", "cuda", "cpu", "train", "eval", "half", "float", "bfloat16")
"""Methods of a model that return it."""
TOKENIZER_METHODS = (
    *("add_tokens", "add_special_tokens", "resize_token_embeddings"),
    *("get_chat_template", "setup_chat_format", "clone_chat_template"),
)
"""Calls that change a tokenizer, or the model for it."""


def of_script(file: Path, words: Sequence[str] = ()) -> ScriptSource:
    """The source of a script. words: the arguments of its command line.

    Raises ConfigError if it cannot be read or has neither GRPOConfig nor GRPOTrainer.
    """
    tree = parsed(file)
    try:
        line = given_arguments(words, file, tree)
        source = Reader(file, tree, line).source()
        add_arguments(source, line.given, line.own)
        return source
    except RecursionError as error:
        raise ConfigError(TOO_DEEP, key=str(file)) from error


class Reader(DataReader):
    """Reads one script."""

    def source(self) -> ScriptSource:
        """Everything that the script sets."""
        source = ScriptSource(self.source_file, is_script=True)
        trainers = self._calls_of("GRPOTrainer")
        configs = self._calls_of("GRPOConfig")
        if not trainers and not configs:
            raise self._without_grpo()
        if len(trainers) > 1:
            source.notes.append(f"the script has {len(trainers)} GRPOTrainer calls, and this reads the last")
        arguments = self._arguments(*trainers[-1], POSITIONS) if trainers else {}
        scope = trainers[-1][1] if trainers else self.module
        self._read_config(source, arguments, configs, scope)
        self._read_trainer(source, arguments, scope)
        self._read_ends(source)
        self._read_tokenizer(source, arguments.get("processing_class") or arguments.get("tokenizer"), scope)
        source.loose = list(self._loose_steps(source))
        source.notes += self.conditions
        if not source.settings and not configs:
            source.notes.append(FROM_COMMAND_LINE)
        return source

    def _without_grpo(self) -> ConfigError:
        found = [name for name in ("SFTTrainer", "DPOTrainer", "PPOTrainer", "RLOOTrainer") if self._calls_of(name)]
        problem = "has no GRPOConfig(...) and no GRPOTrainer(...)"
        return ConfigError(f"{problem}{f', but {found[0]}' if found else ''}", key=str(self.source_file))

    def _read_config(
        self, source: ScriptSource, arguments: dict[str, ast.expr], configs: list[tuple[ast.Call, Scope]], scope: Scope
    ) -> None:
        """Read the GRPOConfig that the trainer gets, else the last one."""
        args = arguments.pop("args", None)
        made = self._made(args, scope)[0] if args is not None else None
        for name, value in self.command_line.base.items():
            source.settings[name] = self.fold(value, self.module)
        chosen = next(((call, place) for call, place in configs if call is made), configs[-1] if configs else None)
        if chosen is not None:
            if len(configs) > 1 and chosen[0] is not made:
                source.notes.append(f"the script has {len(configs)} GRPOConfig calls, and this reads the last")
            for name, value in self._arguments(*chosen, ("output_dir",)).items():
                source.settings[name] = self.fold(value, chosen[1])
        for call, place in self._calls_of("ModelConfig"):
            given = self._arguments(call, place, ("model_name_or_path",))
            given.pop("model_name_or_path", None)  # the trainer gets it
            source.settings |= {name: self.fold(one, place) for name, one in given.items()}
        for target, value, place in self.changes:  # training_args.learning_rate = 1e-6
            if isinstance(args, ast.Name) and isinstance(target.value, ast.Name) and target.value.id == args.id:
                source.settings[target.attr] = self.fold(value, place)

    def _read_trainer(self, source: ScriptSource, arguments: dict[str, ast.expr], scope: Scope) -> None:
        for name, node in arguments.items():
            match name:
                case "model":
                    self._read_model(source, node, scope)
                case "reward_funcs":
                    source.rewards = list(self._rewards(node, scope))
                case "train_dataset":
                    source.data = self.data(node, scope)
                case "eval_dataset":
                    source.eval_data = self.data(node, scope)
                case "peft_config":
                    self._read_lora(source, node, scope)
                case _:
                    source.ignored[name] = self.fold(node, scope)

    def _read_ends(self, source: ScriptSource) -> None:
        """Calls that resume, and that save the result."""
        for call, scope in self.calls:
            name = self._callee(call, scope)
            if name == "train" and (given := self._arguments(call, scope).get("resume_from_checkpoint")):
                source.ignored.setdefault("resume_from_checkpoint", self.fold(given, scope))
            elif name in ("save_model", "save_lora", "save_pretrained_merged", "push_to_hub_merged"):
                source.ignored.setdefault(name, self.fold(call.args[0], scope) if call.args else None)

    def _read_tokenizer(self, source: ScriptSource, node: ast.expr | None, scope: Scope) -> None:
        """What the script does to its tokenizer: calls, attributes, and arguments of from_pretrained."""
        done: list[tuple[str, ast.AST]] = []
        for call, place in self.calls:
            name = self._callee(call, place)
            done += [(name, call)] if name in TOKENIZER_METHODS else []
            if name == "from_pretrained" and "Tokenizer" in ast.unparse(call.func):
                done += [(str(one.arg), one.value) for one in call.keywords if one.arg in TOKENIZER]
        for target, value, _ in self.changes:
            if target.attr in TOKENIZER or "tok" in ast.unparse(target.value).lower():
                done.append((target.attr, ast.copy_location(ast.Assign([target], value), target)))
        for name, one in done:
            before = f"{source.ignored[name]}; " if name in source.ignored else ""
            source.ignored[name] = f"{before}{self._unread(one)}"
        made, place = self._made(node, scope) if node else (None, scope)
        if isinstance(made, ast.Call) and self._callee(made, place) == "from_pretrained" and made.args:
            path = self.fold(made.args[0], place)
            if isinstance(path, str) and isinstance(source.model, str) and path != source.model:
                source.notes.append(
                    f"the tokenizer is that of {path}; save it and the model to a folder: model.path=FOLDER"
                )

    def _read_model(self, source: ScriptSource, node: ast.expr, scope: Scope, depth: int = 0) -> None:
        value = self.fold(node, scope)
        if isinstance(value, str) or depth > 8:
            source.model = value
            return
        made, place = self._made(node, scope)
        while isinstance(made, ast.Call) and isinstance(made.func, ast.Attribute) and made.func.attr in MOVES:
            made, place = self._made(made.func.value, place)
        source.model = source.model or self._unread(node)
        if not isinstance(made, ast.Call):
            return
        callee = self._callee(made, place)
        if isinstance(made.func, ast.Name) and (found := place.function(callee)):
            result, within = self._returned(made, found[0], place)
            result = result.elts[0] if isinstance(result, ast.Tuple) else result  # model, tokenizer
            self._read_model(source, result, within, depth + 1)
        if callee == "get_peft_model":
            inner = self._arguments(made, place, ("model", "peft_config"))
            self._read_model(source, inner.pop("model", made.func), place, depth + 1)
            if config := inner.pop("peft_config", None):
                self._read_lora(source, config, place)
            else:
                source.lora = {name: self.fold(one, place) for name, one in inner.items()}
        elif callee == "prepare_model_for_kbit_training" and made.args:
            self._read_model(source, made.args[0], place, depth + 1)
        elif callee == "from_pretrained":
            given = self._arguments(made, place, ("pretrained_model_name_or_path",))
            values = {name: self.fold(one, place) for name, one in given.items()}
            source.model = values.pop("pretrained_model_name_or_path", None) or values.pop("model_name", None)
            known = ("dtype", "torch_dtype", "attn_implementation", "revision", "trust_remote_code", "max_seq_length")
            for name, one in values.items():
                if name in known or name == "gpu_memory_utilization":
                    source.settings.setdefault(
                        {"gpu_memory_utilization": "vllm_gpu_memory_utilization"}.get(name, name), one
                    )
                elif name == "fast_inference" and one is True:  # Unsloth's name of vLLM in the trainer
                    source.settings.setdefault("use_vllm", True)
                elif one not in (None, False) and name not in ("device_map", "max_lora_rank", "use_cache"):
                    source.ignored[name] = one

    def _read_lora(self, source: ScriptSource, node: ast.expr, scope: Scope) -> None:
        made, place = self._made(node, scope)
        if isinstance(made, ast.Call) and self._callee(made, place) == "LoraConfig":
            source.lora = {name: self.fold(one, place) for name, one in self._arguments(made, place, ("r",)).items()}
        elif isinstance(made, ast.Call) and self._callee(made, place) == "get_peft_config":
            source.settings.setdefault("use_peft", False)  # TRL's ModelConfig has the arguments
        elif not (isinstance(made, ast.Constant) and made.value is None):
            source.notes.append(f"peft_config={self._unread(node)} is not read: set model.lora.rank yourself")

    def _rewards(self, node: ast.expr, scope: Scope) -> Iterator[RewardCall | Unread]:
        if isinstance(node, ast.List | ast.Tuple):
            for one in node.elts:
                yield from self._rewards(one, scope)
            return
        if isinstance(node, ast.Name) and scope.function(node.id):
            yield RewardCall(node.id, line=node.lineno, words=self._words(node.id))
        elif isinstance(node, ast.Name) and (imported := scope.imported(node.id)):
            yield RewardCall(imported[1], imported[0])
        elif isinstance(node, ast.Name) and (found := scope.bound(node.id, node.lineno)):
            yield from self._rewards(found[0].value, found[1]) if found[0].index is None else [self._unread(node)]
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and scope.imported(node.value.id):
            module = ".".join(filter(None, scope.imported(node.value.id) or ()))
            yield RewardCall(node.attr, module)
        elif isinstance(value := self.fold(node, scope), str):
            yield RewardCall("model", path=value)
        elif isinstance(node, ast.Lambda):
            name = f"lambda_{node.lineno}_{node.col_offset}"
            yield RewardCall(name, code=ast.unparse(node), line=node.lineno, words=words_of(node))
        elif isinstance(node, ast.Call) and (name := last_name(node.func)):
            yield self._made_reward(node, name, scope)
        else:
            yield self._unread(node)

    def _made_reward(self, call: ast.Call, name: str, scope: Scope) -> RewardCall:
        """A reward that a call makes, such as `partial(f, weight=2)`."""
        module, there = scope.imported(name) or ("", name)
        values = {key: self.fold(one, scope) for key, one in self._arguments(call, scope).items()}
        if module.startswith("trl"):
            return RewardCall(there, module, values)
        others = {one.col_offset for one, _ in self._calls_of(name) if one.lineno == call.lineno}
        own_name = f"{name}_{call.lineno}" + (f"_{call.col_offset}" if len(others) > 1 else "")
        named = [one.id for one in ast.walk(call) if isinstance(one, ast.Name)]  # partial(f): those of f
        words = frozenset().union(*map(self._words, named))
        return RewardCall(own_name, arguments=values, code=ast.unparse(call), line=call.lineno, words=words)

    def _words(self, name: str) -> frozenset[str]:
        """The words of a function or class of the script."""
        defined = [one for one in ast.walk(self.tree) if isinstance(one, Function | ast.ClassDef) and one.name == name]
        return words_of(*defined)


def words_of(*nodes: ast.AST) -> frozenset[str]:
    """The parameters and texts in code: what a reward may read from its arguments."""
    inner = [one for node in nodes for one in ast.walk(node)]
    words = [one.arg for one in inner if isinstance(one, ast.arg)]
    texts = [one.value for one in inner if isinstance(one, ast.Constant) and isinstance(one.value, str)]
    return frozenset([*words, *texts])
