"""ONNX Runtime: the graph that ONNX Runtime GenAI's builder makes, run by a session with keys and values bound in place.

As in GenAI, past and present share one buffer, so nothing is copied from step to step. The builder's graph computes logits
of every row; the worker's copy of it only those that are asked for.
"""

import json
import sys
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from serving import Engine, run_exporter, serve

WEIGHTS = ("-p", "int4", "-e", "cpu", "--extra_options", "int4_block_size=32", "int4_accuracy_level=4")


class _OnnxRuntime:
    def __init__(self, model: Path, threads: int, capacity: int) -> None:
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
        options.log_severity_level = 3
        session = onnxruntime.InferenceSession(str(model / "model.onnx"), options, ["CPUExecutionProvider"])
        self._session, self._binding, self._length = session, session.io_binding(), 0
        about = json.loads((model / "genai_config.json").read_text("utf-8"))["model"]
        self._vocab_size, head_dim = about["vocab_size"], about["decoder"]["head_size"]
        self._logits: dict[int, NDArray[np.float32]] = {}  # by rows; a new array each time would cost page faults
        self._buffers = []
        for past in session.get_inputs():
            if past.name.startswith("past_key_values."):
                shape = (1, past.shape[1], capacity, head_dim)
                buffer = onnxruntime.OrtValue.ortvalue_from_numpy(np.zeros(shape, np.float32))
                self._buffers.append(buffer)
                self._binding.bind_ortvalue_input(past.name, buffer)
                self._binding.bind_ortvalue_output(past.name.replace("past_key_values.", "present."), buffer)

    def reset(self) -> None:
        self._length = 0

    def feed(self, tokens: list[int], all_logits: bool) -> NDArray[np.float32]:
        self._length += len(tokens)
        self._binding.bind_cpu_input("input_ids", np.array([tokens], np.int64))
        self._binding.bind_cpu_input("attention_mask", np.ones((1, self._length), np.int64))
        self._binding.bind_cpu_input("first_logits", np.array([0 if all_logits else -1], np.int64))
        rows = len(tokens) if all_logits else 1
        if rows not in self._logits:
            self._logits[rows] = np.empty((1, rows, self._vocab_size), np.float32)
        logits = self._logits[rows]
        self._binding.bind_output("logits", "cpu", 0, np.float32, logits.shape, logits.ctypes.data)
        self._session.run_with_iobinding(self._binding)
        return logits[0]


def load(model: Path, threads: int, capacity: int) -> tuple[Engine, str]:
    """The built model, with room for `capacity` tokens."""
    import onnxruntime

    return _OnnxRuntime(model, threads, capacity), f"ONNX Runtime {onnxruntime.__version__}, builder {' '.join(WEIGHTS)}"


def export(source: Path, target: Path) -> None:
    """Have ONNX Runtime GenAI's builder write the model, then give its graph an input `first_logits`."""
    import onnx
    import onnxruntime_genai.models  # noqa: F401  # its absence is told here, by its name

    run_exporter([sys.executable, "-m", "onnxruntime_genai.models.builder", "-i", str(source), "-o", str(target), *WEIGHTS])
    path = target / "model.onnx"
    model = onnx.load(path, load_external_data=False)
    graph = model.graph
    head = next(node for node in graph.node if "logits" in node.output)
    if head.op_type not in ("MatMul", "MatMulNBits"):
        raise RuntimeError(f"the built graph ends in {head.op_type}, wanted a matrix product; its logits cannot be chosen")
    constants = (("first_logits_end", 2**62), ("first_logits_axis", 1))
    graph.initializer.extend(onnx.helper.make_tensor(name, onnx.TensorProto.INT64, [1], [value]) for name, value in constants)
    graph.input.append(onnx.helper.make_tensor_value_info("first_logits", onnx.TensorProto.INT64, [1]))
    inputs = [head.input[0], "first_logits", *(name for name, _ in constants)]
    graph.node.insert(list(graph.node).index(head), onnx.helper.make_node("Slice", inputs, ["rows_with_logits"]))
    head.input[0] = "rows_with_logits"
    onnx.save(model, path)


if __name__ == "__main__":
    serve(load, export, needs="onnxruntime onnxruntime-genai onnx onnx_ir torch transformers")
