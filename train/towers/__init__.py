"""What turns pictures and texts into embeddings: models of open_clip and transformers as two towers."""
