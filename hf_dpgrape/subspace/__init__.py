"""The small space: public random projections and the parameters an optimizer steps on there."""
