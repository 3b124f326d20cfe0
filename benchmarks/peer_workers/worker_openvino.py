"""OpenVINO: the graph that optimum-intel exports for OpenVINO GenAI, run by the runtime's inference requests.

The exported graph computes logits of every row; like GenAI, which cuts the graph before its last matrix, the worker computes
only those that are asked for.

    worker_openvino.py [PRECISION]     INFERENCE_PRECISION_HINT; without it OpenVINO chooses

Where it has AMX, OpenVINO chooses bf16: matrices are then computed in bf16, which is its best at many rows. With f32 it quantizes
activations to int8 in groups instead, which is its best at few. Keys and values are 8 bits wide in both.
"""

import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from serving import Engine, run_exporter, serve

WEIGHTS = ("--weight-format", "int4", "--sym", "--group-size", "64", "--ratio", "1.0")
_TELLING = ("INFERENCE_PRECISION_HINT", "KV_CACHE_PRECISION", "DYNAMIC_QUANTIZATION_GROUP_SIZE", "INFERENCE_NUM_THREADS")


class _OpenVino:
    def __init__(self, model: Path, threads: int, precision: str | None) -> None:
        import openvino

        graph = openvino.Core().read_model(model / "openvino_model.xml")
        _add_logit_choice(graph)
        # Threads are left where the operating system puts them, as every other engine's are.
        settings: dict[str, Any] = {"PERFORMANCE_HINT": "LATENCY", "INFERENCE_NUM_THREADS": threads, "ENABLE_CPU_PINNING": False}
        settings |= {"INFERENCE_PRECISION_HINT": precision} if precision else {}
        compiled = openvino.Core().compile_model(graph, "CPU", settings)
        properties = {name: compiled.get_property(name) for name in _TELLING}
        self.about = ", ".join(f"{name} {getattr(value, 'to_string', lambda v=value: v)()}" for name, value in properties.items())
        self._request = compiled.create_infer_request()
        self._length = 0

    def reset(self) -> None:
        self._request.reset_state()
        self._length = 0

    def feed(self, tokens: list[int], all_logits: bool) -> NDArray[np.float32]:
        start, self._length = self._length, self._length + len(tokens)
        inputs = {
            "input_ids": np.array([tokens], np.int64),
            "attention_mask": np.ones((1, self._length), np.int64),
            "position_ids": np.arange(start, self._length, dtype=np.int64)[None],
            "beam_idx": np.zeros(1, np.int32),
            "first_logits": np.array([0 if all_logits else -1], np.int64),
        }
        self._request.infer(inputs, share_inputs=True)
        logits: NDArray[np.float32] = self._request.get_tensor("logits").data[0]
        return logits


def _add_logit_choice(graph: Any) -> None:
    """Give the graph an input `first_logits`: the row from which on logits are computed."""
    from openvino import opset13

    head = graph.output("logits").get_node().input_value(0).get_node()
    if head.get_type_name() != "MatMul":
        raise RuntimeError(f"the exported graph ends in {head.get_type_name()}, wanted MatMul; its logits cannot be chosen")
    first = opset13.parameter([1], np.int64, name="first_logits")
    first.output(0).set_names({"first_logits"})
    graph.add_parameters([first])
    end, step, axis = (opset13.constant(np.array([value], np.int64)) for value in (2**62, 1, 1))
    head.input(0).replace_source_output(opset13.slice(head.input_value(0), first, end, step, axis).output(0))
    graph.validate_nodes_and_infer_types()


def load(model: Path, threads: int, capacity: int, *, precision: str | None) -> tuple[Engine, str]:
    """The exported model. Its state grows as it must, so the capacity is of no use to it."""
    import openvino

    engine = _OpenVino(model, threads, precision)
    return engine, f"OpenVINO {openvino.__version__}, {' '.join(WEIGHTS)}, head int8; {engine.about}"


def export(source: Path, target: Path) -> None:
    """Have optimum-intel export the model."""
    import optimum.intel  # noqa: F401  # its absence is told here, by its name

    program = str(Path(sys.executable).parent / "optimum-cli")
    run_exporter([program, "export", "openvino", "-m", str(source), "--task", "text-generation-with-past", *WEIGHTS, str(target)])


if __name__ == "__main__":
    serve(partial(load, precision=(*sys.argv[1:], None)[0]), export, needs="openvino optimum-intel nncf torch 'transformers<5.6'")
