// Code that a client of kvplane needs beside the contract. There is no kvplane library here: messages
// come from the .proto files, or from the planes themselves by reflection.

import { fileURLToPath } from "node:url";
import { promisify } from "node:util";
import grpc from "@grpc/grpc-js";
import protoLoader from "@grpc/proto-loader";
import reflection from "grpc-js-reflection-client";

const TIMEOUT_MS = 10_000;
const PROTOS = fileURLToPath(new URL("../../protos", import.meta.url));
const SHAPE = {
  keepCase: true,
  defaults: true, // a field that is 0 is not sent
  longs: String, // incarnations are 64 bits wide, JavaScript's numbers 53
  enums: String,
  oneofs: true,
};

/** A plane at "host:port". `source` of its contract: "protos" or "reflection". */
export async function connect(service, address, source = "protos") {
  const credentials = grpc.credentials.createInsecure();
  const packages =
    source === "reflection"
      ? await reflected(service, address, credentials)
      : grpc.loadPackageDefinition(
          protoLoader.loadSync(["pool", "session", "execution"].map((name) => `kvplane/v1/${name}.proto`), {
            ...SHAPE,
            includeDirs: [PROTOS],
          }),
        );
  return new Plane(new packages.kvplane.v1[service](address, credentials));
}

async function reflected(service, address, credentials) {
  const client = new reflection.GrpcReflection(address, credentials);
  const descriptor = await client.getDescriptorBySymbol(`kvplane.v1.${service}`);
  return descriptor.getPackageObject(SHAPE);
}

class Plane {
  constructor(stub) {
    this.stub = stub;
  }

  /** One call. Every call has a deadline; errors carry `code` and `details`. */
  call(method, request) {
    const deadline = { deadline: Date.now() + TIMEOUT_MS };
    return promisify(this.stub[method].bind(this.stub))(request, new grpc.Metadata(), deadline);
  }

  /** A stream of requests and their answers. */
  stream(method) {
    return new Stream(this.stub[method]());
  }

  close() {
    this.stub.close();
  }
}

class Stream {
  constructor(call) {
    this.call = call;
    this.answers = call[Symbol.asyncIterator]();
  }

  /** Sends a request and waits for its answer. */
  async ask(request) {
    this.call.write(request);
    const { value } = await this.answers.next();
    if (value?.error) throw new Error(`${value.error.reason}: ${value.error.field}: ${value.error.message}`);
    return value;
  }

  end() {
    this.call.end();
  }
}

/** A float32 tensor of zeros. */
export function zeros(...shape) {
  const size = shape.reduce((product, extent) => product * extent, 1);
  return { dtype: "ELEMENT_TYPE_FLOAT32", shape, data: Buffer.alloc(4 * size) };
}
