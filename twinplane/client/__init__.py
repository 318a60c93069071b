"""The client of twinplane.inference.v1, blocking and asynchronous.

`sync` and `aio` hold what waits on the network and nothing else; what both need is written once:
`values` (what callers see), `options` (what they can ask of a generation), `arguments` (checks of
what they hand in), `requests` (values to messages), `responses` (messages to values), `generation`
(a call that can be tried again until its first message), `failures` (statuses to errors),
`endpoint` (addresses, and why one does not answer), `retry` (when to try again), `health` (waiting
until a server takes work), `channel` (how to connect), `base` (a client's settings) and `home` (the
event loop of an asyncio client).
Import the names from `twinplane`.
"""
