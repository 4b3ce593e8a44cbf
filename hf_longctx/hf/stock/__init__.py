"""The callback for people who keep their own trainer."""
