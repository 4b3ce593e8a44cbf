"""Linear and integer programs, solved by HiGHS or CBC."""
