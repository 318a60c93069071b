"""The client of twinplane.inference.v1, blocking and asynchronous.

`sync` and `aio` hold what waits on the network and nothing else; what both need is written once:
`values` (what callers see), `options` (what they can ask of a generation), `requests` (values to
messages), `responses` (messages to values), `generation` (a call that can be tried again until its
first message), `failures` (statuses to errors), `retry` (when to try again) and `channel` (how to
connect).
Import the names from `twinplane`.
"""
