"""Terms of a reward that read texts: one file a type, each from answers to scores.

A reward model that reads the policy's own token ids is none of these: ``stages/rollout.py`` runs it
beside the policy.
"""
