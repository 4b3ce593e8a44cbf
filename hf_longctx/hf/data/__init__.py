"""Data from text and chats to planned batches."""
