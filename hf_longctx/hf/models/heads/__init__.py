"""Output heads: next tokens, classes of documents, classes of tokens; which classes have them and how plans run them."""
