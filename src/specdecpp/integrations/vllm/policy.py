"""The policy of an engine: the one that was asked for, else the best one its head allows."""

from specdecpp.decoder import best_policy
from specdecpp.errors import HeadError
from specdecpp.head import AcceptanceHead
from specdecpp.integrations.vllm.heads import BESIDE
from specdecpp.policies import Policy, WithCopies
from specdecpp.policies.trees import TreePolicy
from specdecpp.request import PolicySpec


def policy_of(spec: PolicySpec | None, head: AcceptanceHead | None, *, draft: str) -> Policy:
    """With its head. Raises `HeadError` where it needs one and there is none."""
    if spec is None:
        return best_policy(head)
    if spec.needs_head and head is None:
        raise HeadError(
            f"the policy needs an acceptance head, and there is none at {draft}/{BESIDE}. Export one there, name one under "
            '"head", or choose a rule that needs none, such as cumulative.'
        )
    if isinstance(spec.policy, WithCopies):
        raise ValueError("copies:... is for our own decoder; under vLLM candidates are those of the draft. Name its own rule.")
    if any(isinstance(policy, TreePolicy) for policy in (spec.policy, *spec.policy.parts)):
        raise ValueError("tree:... is for our own decoder; under vLLM a draft is a chain. Name another rule.")
    return spec.build(head)
