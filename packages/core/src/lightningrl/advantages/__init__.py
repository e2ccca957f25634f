"""Credit arithmetic for authors of assigners and backends: baselines, advantages of tokens, rows, needs."""
