"""The one-sided exchange between ranks: dispatch and combine."""
