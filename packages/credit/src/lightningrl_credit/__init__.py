"""Credit assignment: how an episode's return becomes an advantage of each sampled token.

    group ─► returns(trajectory): one per call ─► baseline over the group, or over each agent's calls ─► Advantages

| plugin       | return of a call                    | advantage                                             |
|--------------|-------------------------------------|-------------------------------------------------------|
| `grpo`       | R, the episode's (identical assignment, arXiv 2508.03680) | (R - mean) / (std + ε), arXiv 2402.03300 |
| `dr_grpo`    | R                                   | R - mean, arXiv 2503.20783                            |
| `rloo`       | R                                   | R - mean of the others, arXiv 2402.14740              |
| `maxrl`      | R                                   | (R - mean) / (mean + ε), arXiv 2602.02710             |
| `opo`        | R                                   | R - mean weighed by tokens, arXiv 2505.23585          |
| `reinforce`  | R                                   | R                                                     |
| `turns`      | Σ γ^k · turn reward                 | any of the above among the same turns                 |
|              | R, discounted once it is compared   | … plus γ^(calls that follow) · any of the above       |
| `states`     | both, discounted                    | among the calls in one state, plus that of R          |
| `branches`   | V̂ of the next state, by branching   | V̂(s_{t+1}) - V̂(s_t), arXiv 2410.01679                |

`Sum`, `PerAgent`, `Whiten` and `Clip` are made of others.

`assign_credit` compares any of them within each role's calls (Dr. MAS, arXiv 2602.08847), and pays each role with its own rewards. `whiten`
normalises over all of a step:
`reinforce` whitened is REINFORCE++, `dr_grpo` whitened is REINFORCE++-baseline (arXiv 2501.03262).

`mean` and `center`, of `lightningrl` too, are for assigners of one's own: of equal rewards they leave exactly nothing, where
`sum(rewards) / len(rewards)` may leave a rounding. `has_signal` says whether a group teaches anything.
"""

from lightningrl.advantages.baselines import Baseline, baseline_advantages, center, mean
from lightningrl.advantages.spread import Channel, ReturnBased
from lightningrl_credit.branches import Branches
from lightningrl_credit.combinators import Clip, PerAgent, Sum, Whiten
from lightningrl_credit.comparison import Compare, assign_credit
from lightningrl_credit.identical import IdenticalAssignment
from lightningrl_credit.judge_assigner import GroupJudge, TurnJudge
from lightningrl_credit.likelihood import Hindsight, InformationGain
from lightningrl_credit.scoring import has_signal
from lightningrl_credit.states import StateGroups
from lightningrl_credit.turn_gae import TurnGae
from lightningrl_credit.turns import TurnReturns
from lightningrl_credit.whiten import whiten

DiscountedReturns = TurnReturns
"""The name that it had."""

__all__ = [
    "Baseline",
    "Branches",
    "Channel",
    "Clip",
    "Compare",
    "DiscountedReturns",
    "GroupJudge",
    "Hindsight",
    "IdenticalAssignment",
    "InformationGain",
    "PerAgent",
    "ReturnBased",
    "StateGroups",
    "Sum",
    "TurnGae",
    "TurnJudge",
    "TurnReturns",
    "Whiten",
    "assign_credit",
    "baseline_advantages",
    "center",
    "has_signal",
    "mean",
    "whiten",
]
