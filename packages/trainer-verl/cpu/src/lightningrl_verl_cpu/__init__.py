"""Test support: verl and vLLM on a machine without a GPU. Never shipped to users.

`settings` holds what a run needs (environment, verl configuration). The other modules are loaded by verl and vLLM
themselves:

    entry point verl.plugins          platform     each process with verl: platform "cpu", shims, transformers replica
    entry point vllm.general_plugins  vllm_patch   each process of vLLM: weights stay replaceable
    checkpoint_engine.custom_backend_module        checkpoint_engine: trainer to replicas over gloo

All of it is inert unless VERL_PLATFORM is "cpu".
"""

from lightningrl_verl_cpu.settings import environment, overrides

__all__ = ["environment", "overrides"]
