"""Where the numbers of a run go beside the console: TensorBoard, Weights & Biases, MLflow, and spans
of OpenTelemetry.
"""
