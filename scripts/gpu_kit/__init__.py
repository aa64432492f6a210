"""The parts of `scripts/gpu_train.py`, in the order in which a call meets them.

options    the command line
clock      the minutes of a call
parts      large files in small ones, and together again
state      the target, recipes, and what lies in `--work`
data       answers, and the target's features at their tokens
training   the common schedule, and one head
results    what the heads reached, as a table

jetspec and torch are imported where they are used: what `--wheels` names has to be on the path before, and
`--step join` needs neither.
"""
