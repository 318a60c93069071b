"""Plans at the edge of what the contract allows are executed, over loopback gRPC."""

from __future__ import annotations

from tests.support.worker_rig import VOCABULARY, added, first, serving, wanted


async def test_a_plan_that_schedules_nothing_is_a_step() -> None:
    async with serving() as rig:
        await rig.attach()
        result = await rig.forward(1, add=[added(2, [1, 2], [20])])
        assert (result.step_id, list(result.rows)) == (1, [])
        result = await rig.forward(2, rows=[2], start_positions=[0], token_counts=[2])
        assert list(result.rows) == [2]


async def test_sequences_up_to_every_limit_are_taken() -> None:
    """40 tokens in one row, 64 in one step, the last token and the last block there are."""
    async with serving() as rig:
        await rig.attach()
        sequences = [added(0, [100] * 40, range(1, 11)), added(7, [100] * 24, range(58, 64))]
        result = await rig.forward(
            1, add=sequences, rows=[7, 0], start_positions=[0, 0], token_counts=[24, 40]
        )
        assert list(result.rows) == [7, 0]


async def test_drafts_come_over_the_wire() -> None:
    """First all right, then the second wrong; each step starts where the last one really ended."""
    right = wanted(8)
    drafting = {"rows": [0], "source_step_distances": [1]}
    async with serving() as rig:
        await rig.attach()
        assert list((await rig.stub.Forward(first())).result.tokens) == right[:1]
        result = await rig.forward(
            2,
            **drafting,
            start_positions=[6],
            token_counts=[3],
            draft_counts=[2],
            literal_draft_counts=[2],
            literal_drafts=right[1:3],
        )
        assert (list(result.rows), list(result.token_counts)) == ([0], [3])
        assert list(result.tokens) == right[1:4]
        result = await rig.forward(
            3,
            **drafting,
            start_positions=[7],
            open_step_distances=[1],
            token_counts=[4],
            draft_counts=[3],
            literal_draft_counts=[3],
            literal_drafts=[right[4], (right[5] + 1) % VOCABULARY, right[6]],
        )
        assert list(result.tokens) == right[4:6]
        result = await rig.forward(4, **drafting, start_positions=[11])
        assert list(result.tokens) == right[6:7]
