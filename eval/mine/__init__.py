"""Mining of hard negatives with a trained model."""
