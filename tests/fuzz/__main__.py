"""``python -m tests.fuzz --modules 5000``: random modules on simulated ranks; prints each that
fails, made small.
"""

import argparse
import sys
import time
import warnings

from tests.fuzz.check import Subject, cases, check, report


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--modules", type=int, default=1000, help="how many")
    parser.add_argument(
        "--seed", type=int, default=1000, help="of the first module; the next ones follow"
    )
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    start, failed, divided = time.monotonic(), 0, []
    for seed in range(options.seed, options.seed + options.modules):
        for made, each in cases(seed):
            way = each[0]
            try:
                subject = Subject(made, way.dtype)
                for way in each:
                    divided.append(check(subject, way))
            except Exception:
                failed += 1
                print(report(made, way), flush=True)
        done = seed - options.seed + 1
        if done % 100 == 0:
            print(f"{done} modules, {failed} failed, {time.monotonic() - start:.0f} s", flush=True)
    shares = [share for share in divided if share is not None]
    print(
        f"{options.modules} modules, {failed} failed; nothing to divide in {len(divided) - len(shares)} layouts of"
    )
    print(
        f"{len(divided)}, in the others a rank holds {sum(shares) / len(shares):.0%} of the parameters on average"
    )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
