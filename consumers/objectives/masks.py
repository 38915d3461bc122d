"""Which tokens are left out because trainer and engine disagree about them; pure functions.

The ratio is proximal / behaviour where the trainer computed the proximal log-probs, else
pi_theta / behaviour: with equal weights on both sides it is the engine's error alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dora_pipe.config.objectives import Mask
from dora_pipe.consumers.objectives.terms import Inputs, row_geometric, row_ratios

if TYPE_CHECKING:
    from torch import Tensor


def kept_tokens(inputs: Inputs, mask: Mask, *, low: float, high: float) -> Tensor:
    """Bool [N]: whether low <= ratio <= high.

    token: each token by its own ratio (IcePop, Ring-1T, arXiv 2510.18855; with `decoupled_ppo`
    around it the whole of it). sequence: whole trajectories by the product of their ratios (masked
    importance sampling, "When speed kills stability", richardli.xyz/rl-collapse). geometric: by the
    product's root of the length, which does not punish long trajectories (the same, part 3).
    """
    trained = inputs.logprobs if inputs.proximal is None else inputs.proximal
    log_ratio = (trained - inputs.behaviour).detach()
    if mask == "sequence":
        ratio = row_ratios(log_ratio, inputs.lengths)
    elif mask == "geometric":
        ratio = row_geometric(log_ratio, inputs.lengths)
    else:
        assert mask == "token"
        ratio = log_ratio.exp()
    return (ratio >= low) & (ratio <= high)
