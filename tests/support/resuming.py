"""A generation as its messages tell it, and the request that goes on behind any part of it."""

from __future__ import annotations

from collections.abc import AsyncIterable
from dataclasses import dataclass, field

from twinplane.inference.v1 import inference_pb2 as pb


@dataclass
class Told:
    """What the messages of a stream have said. `points` are after each delta: how many tokens and
    how much text there were.
    """

    started: pb.GenerationStarted = field(default_factory=pb.GenerationStarted)
    finished: pb.GenerationFinished | None = None
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    origin: pb.GenerationOrigin | None = None
    points: list[tuple[int, str]] = field(default_factory=list)

    def take(self, message: pb.GenerateResponse) -> None:
        match message.WhichOneof("event"):
            case "started":
                self.started = message.started
            case "delta":
                self.token_ids += message.delta.token_ids
                self.text += message.delta.text
                if message.delta.HasField("origin"):
                    self.origin = message.delta.origin
                self.points.append((len(self.token_ids), self.text))
            case _:
                self.finished = message.finished

    def end(self) -> tuple[object, ...]:
        """All that its end says, but for what the prefix cache knew."""
        finished = self.finished
        assert finished is not None
        matched = finished.WhichOneof("matched")
        return (
            finished.reason,
            matched and getattr(finished, matched),
            finished.usage.prompt_token_count,
            finished.usage.completion_token_count,
            finished.arithmetic_changed,
        )


async def told(messages: AsyncIterable[pb.GenerateResponse]) -> Told:
    """Reads a stream to its end."""
    made = Told()
    async for message in messages:
        made.take(message)
    return made


def resumption(
    request: pb.GenerateRequest, whole: Told, count: int, text: str | None = None
) -> pb.GenerateRequest:
    """The request that goes on behind the first tokens; `text` is what its client has of it."""
    again = pb.GenerateRequest()
    again.CopyFrom(request)
    again.request_id = whole.started.request_id
    again.sampling.CopyFrom(whole.started.sampling)
    again.resume.token_ids.extend(whole.token_ids[:count])
    if count and whole.origin is not None:
        again.resume.origin.CopyFrom(whole.origin)
    if text is not None:
        again.resume.text_byte_count = len(text.encode())
    again.resume.SetInParent()
    return again
