"""The linear layers of a model under their source names, for what is measured on them."""

from __future__ import annotations

from collections.abc import Mapping

from pipeline.checkpoint.binding import Binder
from pipeline.checkpoint.families import family_of
from pipeline.checkpoint.hfconfig import read_architecture
from pipeline.checkpoint.ledger import Ledger
from pipeline.checkpoint.quantization.scheme import is_linear_weight
from pipeline.checkpoint.readers import TensorSource

# Target module (``attention.qkv``) to source names; q, k and v apart.
LayerLinears = Mapping[str, tuple[str, ...]]


def layer_linears(source: TensorSource) -> list[LayerLinears]:
    """Return the linears of each layer, in the order in which the target stacks them.

    Raises:
        SourceError: The model is not supported.
    """
    architecture = read_architecture(source.config, str(source.path))
    family = family_of(architecture.name)
    binder = Binder(source, architecture, family, Ledger(()), lambda info, rule: True)
    rules = [rule for rule in family.rules if rule.applies(architecture) and is_linear_weight(rule)]
    return [
        {
            rule.target.removesuffix(".weight"): tuple(
                name.removesuffix(".weight") for name in rule.source_names(architecture, names.source)
            )
            for rule in rules
        }
        for names in binder.layer_names(range(architecture.num_layers))
    ]
