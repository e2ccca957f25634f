"""`lightningrl curate`: runs, filtered and split, as data for tuning."""
