"""Text training of multimodal models: the classes that run, their text model, and what belongs to images, sound and video."""
