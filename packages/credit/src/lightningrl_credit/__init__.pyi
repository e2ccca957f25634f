"""The public names and where each is defined: type checkers read this list, and `__init__.py` imports from it."""

from lightningrl_credit.baselines import IdenticalAssignment as IdenticalAssignment
from lightningrl_credit.branches import Branches as Branches
from lightningrl_credit.combinators import Clip as Clip
from lightningrl_credit.combinators import Part as Part
from lightningrl_credit.combinators import Sum as Sum
from lightningrl_credit.comparison import Compare as Compare
from lightningrl_credit.comparison import assign_credit as assign_credit
from lightningrl_credit.comparison import whiten as whiten
from lightningrl_credit.judge_assigner import GroupJudge as GroupJudge
from lightningrl_credit.judge_assigner import TurnJudge as TurnJudge
from lightningrl_credit.log_ratios import ReferenceKl as ReferenceKl
from lightningrl_credit.log_ratios import TeacherCredit as TeacherCredit
from lightningrl_credit.scoring import has_signal as has_signal
from lightningrl_credit.states import StateGroups as StateGroups
from lightningrl_credit.turn_gae import TurnGae as TurnGae
from lightningrl_credit.turns import TurnReturns as TurnReturns

__all__: list[str]
