"""The tests of renewed certificates fail when a step is taken out of a copy of the tree."""

from __future__ import annotations

from tests.mutants.fault import Fault, planted

TESTS = "tests/rpc/test_renewed_certificates.py"
FAULTS = (
    *planted(
        "kvplane/transport/renewed.py",
        TESTS,
        {
            "files_are_read_once": ("if stamps == self._stamps:", "if True:"),
            "connections_keep_the_first_context": ("    context.sni_callback = renew\n", ""),
        },
    ),
    *planted(
        "integrations/router/engine_tls.py",
        TESTS,
        {
            "a_router_keeps_the_first_authority": (
                "return self._renewed.get().wrap_bio(",
                "return self._renewed._value.wrap_bio(",
            ),
            "a_router_trusts_former_authorities": (
                "self._renewed = Renewed(lambda: ssl.create_default_context(cafile=ca), [ca])",
                (
                    "kept = ssl.create_default_context()\n"
                    "        self._renewed = "
                    "Renewed(lambda: kept.load_verify_locations(ca) or kept, [ca])"
                ),
            ),
        },
    ),
    Fault(
        "a_certificate_is_taken_without_its_key",
        "kvplane/serving/certificates.py",
        "    server_context(tls.certificate, tls.key, tls.client_ca)\n",
        "",
        TESTS,
    ),
    Fault(
        "a_client_takes_a_certificate_without_its_key",
        "kvplane/transport/tls.py",
        "            server_context(tls.cert_file, tls.key_file)\n",
        "            pass\n",
        TESTS,
    ),
    Fault(
        "a_data_plane_keeps_its_first_certificate",
        "data_plane/server/registration_client.py",
        "                await self._reopen()\n",
        "",
        TESTS,
    ),
)
