from conftest_trainer import make_trainer

__all__ = ["make_trainer"]
