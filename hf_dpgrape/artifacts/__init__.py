"""What a run leaves behind: record, model card, report, plots."""
