"""A process of its own that loads a pair and answers one request, as the first thing it does.

    python -m realpair.fresh '{"started": TIME, "target": ..., "draft": ..., "device": ..., "request": {...} or null}'

Prints JSON: seconds from the start of the process to the pair, seconds to make the decoder, which measures what steps cost, and
tokens and seconds of the answer.
"""

import json
import sys
import time


def main() -> None:
    asked = json.loads(sys.argv[1])
    import specdecpp as sd

    pair = sd.load_pair(asked["target"], draft=asked["draft"], device=asked["device"])
    found: dict[str, float] = {"loaded_s": time.time() - asked["started"]}
    if (request := asked["request"]) is not None:
        made = time.perf_counter()
        decoder = sd.Decoder(pair, reuses=False)
        started = time.perf_counter()
        found["decoder_s"] = started - made
        out = decoder.generate(request.pop("prompt"), **request)
        found |= {"tokens": len(out.tokens), "seconds": time.perf_counter() - started, "reading_s": out.metrics.prefill_s}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
