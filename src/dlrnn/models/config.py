"""The configuration of a network, checked before anything is built."""

import inspect
from collections.abc import Callable, Iterable, Mapping
from copy import deepcopy
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple, cast, get_args, get_type_hints

from torch import nn

from dlrnn.common.cached import cached
from dlrnn.common.suggestions import suggestion
from dlrnn.common.untrusted import imported, is_ours
from dlrnn.nn.mixer import Mixer
from dlrnn.ops.checks import require, require_count

MIXERS = {
    "dlr": "dlrnn.nn.DLR",
    "dss": "dlrnn.nn.DSS",
    "s4d": "dlrnn.nn.S4D",
    "s4": "dlrnn.nn.S4",
    "sgconv": "dlrnn.nn.SGConv",
    "attention": "dlrnn.nn.Attention",
    "local-attention": "dlrnn.nn.LocalAttention",
    "attention-ff": "dlrnn.nn.AttentionFF",
    "tape": "dlrnn.nn.TapeDLR",
    "gated-dlr": "dlrnn.nn.GatedDLR",
}
"""Built-in mixers. Others are named by their import path, `my_package.MyLayer`."""

MOST_LAYERS = 1000
MOST_CHANNELS = 2**20
"""The largest d_model: one H x H matrix of it has 4 TiB."""


def mixer_names(pattern: str) -> tuple[str, ...]:
    """The mixers of a pattern, "tape,dlr,attention", in the order of the blocks."""
    return tuple(pattern.split(","))


def foreign_mixers(pattern: str) -> list[str]:
    """The names in a pattern that mean no mixer of dlrnn: import paths of users' classes."""
    return [name for name in mixer_names(pattern) if name not in MIXERS and not is_ours(name)]


def is_built_in(pattern: str) -> bool:
    """Whether every name or import path of a pattern means a mixer of dlrnn."""
    return not foreign_mixers(pattern)


Norm = Literal["pre", "post"]
Pooling = Literal["max", "mean", "last"]


@dataclass(frozen=True)
class ModelConfig:
    """A network of `layers` blocks, each around a mixer.

        ModelConfig(mixer="dlr", mixer_options={"d_state": 4096}, d_model=128, layers=6)
        ModelConfig(mixer="dlr,attention", mixer_options={"dlr": {"d_state": 64}}, layers=4)

    Attributes:
        mixer: a name from `MIXERS`, or the import path of a class, `my_package.MyLayer`; or
            several, separated by commas, for the first blocks, repeated to the depth.
        mixer_options: keyword arguments of its constructor, without d_model; of several mixers, a
            dict by name of theirs.
        d_model: channels, H.
        layers: blocks.
        norm: LayerNorm before the mixer (and once after the last block), or after the sum.
        pooling: how a network with one output for each sequence forms one vector.
    """

    mixer: str = "dlr"
    mixer_options: dict[str, Any] = field(default_factory=dict)
    d_model: int = 128
    layers: int = 1
    norm: Norm = "post"
    pooling: Pooling = "max"

    def __post_init__(self) -> None:
        check_fields(self, ("d_model", "layers"), {"norm": Norm, "pooling": Pooling})
        kind = type(self.mixer_options).__name__
        require(isinstance(self.mixer_options, dict), f"mixer_options must be a dict, not a {kind}")
        object.__setattr__(self, "mixer_options", deepcopy(self.mixer_options))
        self._check_pattern()
        if "." not in str(self.mixer):
            self.check_mixer()  # a user's class may be missing here: runs of it can still be read

    def _check_pattern(self) -> None:
        """Several mixers: options are given by name, and there are as many blocks at least."""
        names = mixer_names(str(self.mixer))
        if len(names) == 1:
            return
        for name, options in self.mixer_options.items():
            by_name = "the options of several mixers are given by name"
            wanted = f"{by_name}, for {', '.join(dict.fromkeys(names))}; got {name!r}"
            require(name in names, wanted)
            kind = type(options).__name__
            require(isinstance(options, dict), f"{by_name}: those of {name} are no dict but {kind}")
        count = len(names)
        sentence = f"layers must be at least {count}, the mixers of {self.mixer!r}"
        require(self.layers >= count, f"{sentence}, not {self.layers}")

    def _of_each(self) -> list[tuple[str, dict[str, Any]]]:
        """The name and the options of each mixer of the pattern."""
        names = mixer_names(self.mixer)
        if len(names) == 1:
            return [(self.mixer, self.mixer_options)]
        return [(name, self.mixer_options.get(name, {})) for name in names]

    def check_mixer(self) -> None:
        """Raise for an unknown mixer or option."""
        require(isinstance(self.mixer, str), _no_name(self.mixer))
        for name, options in self._of_each():
            _check_options(name, mixer_class(name), options)

    def option_types(self) -> dict[str, Any]:
        """The type of each option of built-in mixers: "d_state", of several "dlr.d_state"."""
        types = dict[str, Any]()
        for name, _ in self._of_each():
            if is_built_in(name):
                prefix = "" if name == self.mixer else f"{name}."
                types |= {prefix + option: kind for option, kind in _option_types(name).items()}
        return types

    def given_options(self) -> dict[str, Any]:
        """The options that are given, by the names of `option_types`."""
        if "," not in self.mixer:
            return self.mixer_options
        return {
            f"{name}.{option}": value
            for name, options in self._of_each()
            for option, value in options.items()
        }

    def with_lengths(self, change: Callable[[int], int]) -> "ModelConfig":
        """With another `length` for every mixer that has this option and can grow."""
        changed = {}
        for name, options in self._of_each():
            grows = issubclass(mixer_class(name), Mixer)
            own = {"length": change(options["length"])} if grows and "length" in options else {}
            changed[name] = options | own
        options = changed if "," in self.mixer else changed[self.mixer]
        return replace(self, mixer_options=options)

    def make_mixer(self, block: int = 0) -> nn.Module:
        """A newly initialised mixer of a block; errors of its constructor become a ValueError."""
        self.check_mixer()
        each = self._of_each()
        name, options = each[block % len(each)]
        try:
            return mixer_class(name)(self.d_model, **options)
        except ValueError:
            raise
        except Exception as error:  # a user's constructor may raise anything
            reason = " ".join(str(error).split()) or type(error).__name__
            raise ValueError(f"the mixer {name!r} cannot be made: {reason}") from error


def check_fields(config: Any, counts: Iterable[str], choices: Mapping[str, Any]) -> None:
    """Check fields that must be counts of at least 1, and fields with one of a Literal's values."""
    for name in counts:
        require_count(name, getattr(config, name))
    for name, most in (("layers", MOST_LAYERS), ("d_model", MOST_CHANNELS)):
        value = getattr(config, name)
        require(value <= most, f"{name} must be at most {most}, not {value}")
    for name, kind in choices.items():
        value, allowed = getattr(config, name), get_args(kind)
        require(value in allowed, f"{name} must be one of {', '.join(allowed)}, not {value!r}")


def _no_name(mixer: object) -> str:
    return f"mixer must be a name or an import path, not {mixer!r}"


def mixer_class(name: str) -> type[nn.Module]:
    """The class of a mixer, by its name or its import path."""
    require(isinstance(name, str), _no_name(name))
    path = MIXERS.get(name, name)
    if not path.rpartition(".")[0]:
        raise ValueError(f"there is no mixer {name!r}: {_advice(name, list(MIXERS))}")
    found = imported(path, f"the mixer {name!r}")
    is_module = isinstance(found, type) and issubclass(found, nn.Module)
    require(is_module, f"the mixer {name!r} must be a class of torch modules, and {path} is not")
    return cast("type[nn.Module]", found)


def named_arguments(call: Callable[..., Any]) -> list[inspect.Parameter]:
    """The parameters of a function that can be given by name."""
    single = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return [each for each in inspect.signature(call).parameters.values() if each.kind in single]


def inherited_arguments(owner: type[nn.Module], method: str) -> list[inspect.Parameter]:
    """Named parameters of the base-class methods to which a class passes its `**kwargs`.

    The first parameter of each (x, d_model) is left out: the caller always gives it.
    """
    found: list[inspect.Parameter] = []
    for each in owner.__mro__[: owner.__mro__.index(nn.Module)]:
        function = vars(each).get(method)
        if function is None:
            continue
        if not inspect.isfunction(function):
            break
        every = list(inspect.signature(function).parameters.values())
        named = named_arguments(function)[1:]  # without self
        found += named[1:] if named and named[0].kind is named[0].POSITIONAL_OR_KEYWORD else named
        if all(parameter.kind is not parameter.VAR_KEYWORD for parameter in every):
            break
    return found


class _Arguments(NamedTuple):
    """The parameters of a mixer's constructor."""

    d_model: str
    """The name of the first one; "" if there is none."""
    others: list[inspect.Parameter]
    names: dict[str, None]
    """The names of all options, with those of base classes."""


@cached
def _arguments(mixer: type[nn.Module]) -> _Arguments:
    """The parameters of a class, inspected once."""
    named = named_arguments(mixer)
    inherited = inherited_arguments(mixer, "__init__")
    is_first = bool(named) and named[0].kind is named[0].POSITIONAL_OR_KEYWORD
    others = named[1:] if is_first else named
    d_model = named[0].name if is_first else "d_model" if named or inherited else ""
    return _Arguments(d_model, others, dict.fromkeys(each.name for each in (*others, *inherited)))


@cached
def _option_types(name: str) -> dict[str, Any]:
    """The types of the options of a built-in mixer."""
    mixer, hints = mixer_class(name), dict[str, Any]()
    for owner in reversed(mixer.__mro__[: mixer.__mro__.index(nn.Module)]):
        if "__init__" in vars(owner):
            hints |= get_type_hints(vars(owner)["__init__"])
    return {option: hints[option] for option in _arguments(mixer).names}


def _check_options(name: str, mixer: type[nn.Module], options: dict[str, Any]) -> None:
    """Refuse options that are not named parameters: `**kwargs` would accept a misspelt one."""
    d_model, others, names = _arguments(mixer)
    require(bool(d_model), f"the mixer {name!r} must take d_model first, and it takes nothing")
    for option in options:
        require(option != d_model, f"{option} is set for the model, not in mixer_options")
        if option not in names:
            advice = _advice(option, list(names))
            raise ValueError(f"the mixer {name!r} has no option {option!r}: {advice}")
    for parameter in others:  # the class may give its base classes what they need
        given = parameter.name in options or parameter.default is not parameter.empty
        require(given, f"the mixer {name!r} needs the option {parameter.name} in mixer_options")


def _advice(wrong: object, known: list[str]) -> str:
    return suggestion(wrong, known, f"it can be {', '.join(known)}" if known else "it takes none")
