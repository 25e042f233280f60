//! Makes the stubs of the contract. It runs the protoc on the path, or the one that PROTOC names.

const PROTOS: &str = "../../protos";

fn main() -> std::io::Result<()> {
    let files =
        ["pool", "session", "execution"].map(|name| format!("{PROTOS}/kvplane/v1/{name}.proto"));
    tonic_build::configure().build_server(false).compile_protos(&files, &[PROTOS])
}
