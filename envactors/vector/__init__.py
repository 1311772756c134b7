"""The facade: batches over handles and their futures."""
