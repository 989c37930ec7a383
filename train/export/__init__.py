"""Export of a trained model for open_clip, sentence-transformers, transformers and onnxruntime, with a model card."""
