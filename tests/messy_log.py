"""A messy play log of twelve thousand lines, as a newcomer brings it: for tests of the recipe for one's own data."""

from __future__ import annotations

from pathlib import Path

import numpy as np


def write_messy_log(path: Path, plays: int = 11_400, seed: int = 0) -> None:
    """Writes a CSV with semicolons, headers in capitals, latin-1 names, ids with leading zeros, a user named NA, play
    times in seconds beside durations in milliseconds, repeated, empty and impossible rows.

    Taste is a product of four hidden traits of users and items beside their means, so a model can learn much more than
    means. Half of the plays are of items that fit; a quarter of the finish rates say little.
    """
    rng = np.random.default_rng(seed)
    users, items, traits = 160, 250, 4
    user_taste, item_taste = rng.normal(size=(users, traits)), rng.normal(size=(items, traits))
    user_bias, item_bias = 0.6 * rng.normal(size=users), 0.9 * rng.normal(size=items)
    popularity = rng.dirichlet(np.full(items, 0.7))
    durations = rng.integers(5, 180, items)
    lines = []
    for _ in range(plays):
        user = int(rng.integers(users))
        item = int(rng.choice(items, p=popularity))
        if rng.random() < 0.5:  # the feed knows a little: the best of three
            offered = rng.choice(items, 3, p=popularity)
            item = int(offered[np.argmax(user_taste[user] @ item_taste[offered].T)])
        liking = 2.0 * user_taste[user] @ item_taste[item] / traits**0.5 + user_bias[user] + item_bias[item]
        liked = rng.random() < 1 / (1 + np.exp(-2.5 * liking))
        clear = rng.random() < 0.75
        rate = (rng.uniform(0.82, 1.3) if liked else rng.uniform(0, 0.18)) if clear else rng.uniform(0.25, 0.75)
        name = "NA" if user == 7 else f"{user:05d}" if user % 2 else f"Zoë {user}"
        seconds = rate * durations[item]
        lines.append(f"{name};v{item};{seconds:.2f};{durations[item] * 1000};{1_700_000_000 + len(lines) * 60}")
    repeated = [lines[i] for i in rng.integers(len(lines), size=400)]
    broken = [";v1;3.0;10000;1700000000", "00001;;3.0;10000;1700000000", "00001;v1;;10000;1700000000"] * 50
    broken += ["00003;v2;5.0;0;1700000000", "00003;v2;-4;12000;1700000000"] * 25
    lines += repeated + broken
    rng.shuffle(lines)
    path.write_bytes("\n".join(["User ID;Video ID;WATCHED;Duration;Time", *lines, ""]).encode("latin-1"))
