"""llama.cpp's OpenAI-compatible server, by the interpreter of the environment with xllamacpp.

usage: python llamacpp_server.py FILE.gguf PORT SLOTS TOKENS_PER_SLOT THREADS; serves until killed.
"""

import signal
import sys

import xllamacpp


def main() -> None:
    file, port, slots, tokens, threads = sys.argv[1], *map(int, sys.argv[2:])
    settings = xllamacpp.CommonParams()
    settings.model.path = file
    settings.port = port
    settings.n_parallel = slots
    settings.n_ctx = slots * tokens
    settings.cpuparams.n_threads = threads
    settings.cpuparams_batch.n_threads = threads
    settings.cache_prompt = False
    server = xllamacpp.Server(settings)  # stops when it is collected
    signal.sigwait({signal.SIGTERM, signal.SIGINT})
    del server


if __name__ == "__main__":
    main()
