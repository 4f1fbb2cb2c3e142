"""The README of a final model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import grpocli
from grpocli.tracking.run_dir import RunDir

CARD = """\
---
library_name: transformers
pipeline_tag: text-generation
tags: [grpocli, grpo, reinforcement-learning]
---

# {name}

Trained by reinforcement learning from verifiable rewards with [grpocli](https://pypi.org/project/grpocli) {version}.

| | |
|---|---|
| started from | `{base}` |
| steps | {steps} |
| held-out accuracy at temperature 1 | {before} before, {after} after |
| held-out accuracy, greedy | {greedy_before} before, {greedy_after} after |

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("PATH_TO_THIS_FOLDER")
tokenizer = AutoTokenizer.from_pretrained("PATH_TO_THIS_FOLDER")
```

The config that made it:

```yaml
{config}```
"""


def model_card(run_dir: RunDir, base: str, summary: Mapping[str, Any]) -> str:
    """The card of a run's final model."""

    def number(key: str) -> str:
        value = summary.get(key)
        return "not measured" if value is None else f"{value:.3f}"

    return CARD.format(
        name=run_dir.path.name,
        version=grpocli.__version__,
        base=base,
        steps=summary["steps"],
        before=number("eval/accuracy_before"),
        after=number("eval/accuracy"),
        greedy_before=number("eval/accuracy_greedy_before"),
        greedy_after=number("eval/accuracy_greedy"),
        config=run_dir.config.read_text(),
    )
