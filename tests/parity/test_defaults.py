"""The table of foreign names has every field of TRL's GRPOConfig, with its default."""

from __future__ import annotations

import dataclasses

from parity.table import Table

from grpocli_tools.porting.foreign_names import GRPO_CONFIG, TRAINING_ARGUMENTS, UNSTATED


def test_every_field_of_grpo_config_is_in_the_table_with_its_default(table: Table) -> None:
    from trl import GRPOConfig

    assert set(GRPOConfig.__annotations__) == set(GRPO_CONFIG)
    fields = {field.name: field for field in dataclasses.fields(GRPOConfig)}
    for name, stated in (GRPO_CONFIG | TRAINING_ARGUMENTS).items():
        if name in fields and stated.default is not UNSTATED:
            field = fields[name]
            made = field.default_factory() if field.default is dataclasses.MISSING else field.default
            assert made == stated.default, name
