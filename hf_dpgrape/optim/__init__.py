"""Optimizers that ordinary libraries lack, and how their groups are made."""
