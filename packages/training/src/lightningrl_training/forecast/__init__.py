"""Will it learn? A forecast of a run's gain from some dozens of rollouts, and its account afterwards.

credited groups ─► Evidence (pass@k, signal, gradient's signal to noise, format, nats that a step moves a rollout by)
Evidence ─► predict, with the coefficients of calibration.json ─► GainForecast, an interval ─► forecast.json of the run
run's end ─► outcome beside it ─► `lightningrl forecasts`: how often intervals held
"""
