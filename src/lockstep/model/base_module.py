"""`BaseModule`: a module that says itself how its weights begin."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from lockstep.errors import ConfigError


class BaseModule(nn.Module):
    """A module whose `init_weights` is called before training: by a Runner where it is the model, else by that.

    Args:
        init_cfg: MMEngine's; must be None, because weights are initialised by `init_weights`.

    Example:
        >>> class Head(BaseModule):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.linear = nn.Linear(4, 2)
        ...     def init_weights(self):
        ...         nn.init.zeros_(self.linear.weight)
        >>> class Net(BaseModule):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.heads = nn.ModuleList([Head()])
        >>> net = Net()
        >>> net.init_weights()
        >>> net.heads[0].linear.weight.abs().max().item()
        0.0
    """

    def __init__(self, init_cfg: None = None) -> None:
        super().__init__()
        if init_cfg is not None:
            raise ConfigError(
                f"`init_cfg` must be None, but is {init_cfg!r}. Initialise the weights in `init_weights`, which a "
                "Runner calls, by the functions of torch.nn.init; give a file of weights to the Runner as `load_from`"
            )

    def init_weights(self) -> None:
        """Let every `BaseModule` inside initialise its weights; all others stay as their constructors have left them.

        A subclass initialises its own here, and calls this for the others. A Runner that is to train calls it on every
        rank, with the same random numbers, before anything is loaded.
        """
        for module in _outermost(self):
            module.init_weights()


def _outermost(module: nn.Module) -> Iterator[BaseModule]:
    """Yield the modules inside that know how to begin, but not those within them, which are theirs to call."""
    for child in module.children():
        if isinstance(child, BaseModule):
            yield child
        else:
            yield from _outermost(child)
