"""Faults of models that keep latents, which the probe notices, and a text that is generated."""

from __future__ import annotations

from tests.mutants.fault import Fault

ABSORBED = "kvplane/transformers/absorbed.py"
ENDS = "    return of_keys, of_values\n"
OVER = "    return torch.cat((plain @ of_keys, rotary), dim=-1)"
TESTS = {
    "probe": "tests/mutants/walks.py::test_a_probe_of_latents",
    "text": "tests/mutants/walks.py::test_a_text_of_latents",
}

FAULTS = tuple(
    Fault(f"{name}, {noticed}", file, old, new, test)
    for name, file, old, new in (
        (  # Queries absorb the part of the projection that makes values.
            "keys_and_values_halves_are_exchanged",
            ABSORBED,
            ENDS,
            "    return of_values, of_keys\n",
        ),
        (  # The projection's rows are taken head by head in the other order.
            "heads_are_interleaved",
            ABSORBED,
            ENDS,
            "    return of_keys.flip(0), of_values.flip(0)\n",
        ),
        (  # Queries begin with what latents end with.
            "rotary_parts_come_first",
            ABSORBED,
            OVER,
            f"{OVER}.roll(module.qk_rope_head_dim, -1)",
        ),
        (  # Scores are of the parts without positions alone.
            "rotary_parts_are_lost",
            ABSORBED,
            OVER,
            OVER.replace("rotary", "0 * rotary"),
        ),
        (  # What is stored is not what the projection takes.
            "latents_are_not_normed",
            "kvplane/transformers/models/adapters.py",
            "return torch.cat((latent, rotary), dim=-1), latent",
            "return torch.cat((latent / latent.std(-1, keepdim=True), rotary), dim=-1), latent",
        ),
        (  # All heads project their weighted latents as the first one does.
            "outputs_are_of_one_head",
            ABSORBED,
            ENDS,
            "    return of_keys, of_values[:1].expand_as(of_values)\n",
        ),
        (  # Attention takes the default scale of what is stored.
            "scales_are_of_the_latents_size",
            "kvplane/transformers/attention.py",
            "scale = float(scaling or 0.0)",
            "scale = 40**-0.5",
        ),
        (  # The data plane takes a value from the wrong end of its row.
            "values_are_the_end_of_latents",
            "data_plane/memory/pages.py",
            "stored[-1][..., : self.group.value_size]",
            "stored[-1][..., -self.group.value_size :]",
        ),
    )
    for noticed, test in TESTS.items()
)
