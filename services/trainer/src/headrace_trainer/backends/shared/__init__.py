"""What several training backends share: the learned model, figures, optimizer, fit of a checkpoint, warm-up, losses."""
