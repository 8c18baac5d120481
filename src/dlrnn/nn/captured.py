"""Steps in a loop: at fixed addresses, and on a GPU by replaying a CUDA graph."""

from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from dlrnn.ops.checks import require, require_count


class CapturedSteps:
    """The steps of a layer or a model that streams, with one batch size.

    On a GPU the first call captures a step in a CUDA graph, which every call replays: it has no
    overhead of Python and of launches. On other devices a call is a step.

        y, state = model(prompt, return_state=True)
        step = CapturedSteps(model, state, steps=1000)
        for _ in range(1000):
            y_t = step(x_t)               # overwritten by the next call
        step.state                        # the state after them

    No gradients are recorded.

    Args:
        module: a `Mixer`, a `SequenceModel`, or another module with `step(x, state)`.
        state: the state before the first step; it is copied.
        steps: how many steps are made at most. A state that grows (attention) gets room for them.
    """

    def __init__(self, module: nn.Module, state: Any, steps: int) -> None:
        require_count("steps", steps)
        require(not module.training, "CapturedSteps needs a module in eval mode: call .eval()")
        self._stepper, self._steps, self._left = cast("Any", module), steps, steps
        self.state = state_in_place(module, state, steps)
        self._graph: torch.cuda.CUDAGraph | None = None

    @torch.no_grad()
    def __call__(self, x: Tensor) -> Tensor:
        """The output for the next position, x [B, ...]."""
        made = f"these steps were captured for {self._steps} positions, and all have been made"
        require(self._left > 0, f"{made}: give CapturedSteps more steps")
        self._left -= 1
        if not x.is_cuda:
            y, self.state = self._stepper.step(x, self.state)
            return cast("Tensor", y)
        if self._graph is None:
            self._capture(x)
        self._x.copy_(x)
        assert self._graph is not None
        self._graph.replay()
        return self._y

    def _capture(self, x: Tensor) -> None:
        self._x = x.clone()
        current, side = torch.cuda.current_stream(x.device), torch.cuda.Stream(x.device)
        side.wait_stream(current)
        with torch.cuda.stream(side):
            for _ in range(2):  # compilation and workspaces of libraries must not be captured
                self._step(self._x, _copied(self.state))
        current.wait_stream(side)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, capture_error_mode="thread_local"):
            self._y = self._step(self._x, self.state)

    def _step(self, x: Tensor, state: Any) -> Tensor:
        """A step; what it returns instead of overwriting the state is copied into the state."""
        y: Tensor
        y, after = self._stepper.step(x, state)
        before, after = tree_leaves(state), tree_leaves(after)
        kind = type(self._stepper).__name__
        same = len(before) == len(after)
        grows = f"the state of {kind} grows with every step, and CapturedSteps needs a fixed size"
        for old, new in zip(before, after, strict=False):
            if isinstance(old, Tensor) and new is not old:
                same = same and old.shape == new.shape
                require(same, grows)
                old.copy_(new)
        require(same, grows)
        return y


def state_in_place(module: Any, state: Any, steps: int) -> Any:
    """The state in tensors of its own, which `steps` steps may overwrite."""
    return module.in_place(state, steps) if hasattr(module, "in_place") else _copied(state)


def _copied(state: Any) -> Any:
    def copy(x: Tensor) -> Tensor:
        return x.detach().clone(memory_format=torch.contiguous_format)

    return tree_map_only(Tensor, copy, state)
