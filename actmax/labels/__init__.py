"""Automatic labels of neurons: made on train documents, chosen on validation documents, scored on test documents."""
