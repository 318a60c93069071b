// A client of Twinplane that shares no code with it: gRPC from the .proto files, in Node.
//
//   node client.mjs ADDRESS generate '{"text": "Once", "stop": {"max_tokens": 8}}'
//   node client.mjs ADDRESS cancel   '{"text": "Once"}'     leaves after the first delta
//   node client.mjs ADDRESS tokenize | detokenize | listModels   '{…}'
//
// A fourth argument is a service config, and turns gRPC's own retries on.
//
// Prints one JSON line per message, and {"error": …} with the status of a call that failed.
import { fileURLToPath } from "node:url";
import grpc from "@grpc/grpc-js";
import protoLoader from "@grpc/proto-loader";

const protos = fileURLToPath(new URL("../../../protos", import.meta.url));
const definition = protoLoader.loadSync("twinplane/inference/v1/inference.proto", {
  includeDirs: [protos],
  keepCase: true,
  defaults: true,
  enums: String,
  longs: String,
  oneofs: true,
});
const { InferenceService } = grpc.loadPackageDefinition(definition).twinplane.inference.v1;

const [address, method, request, serviceConfig] = process.argv.slice(2);
const options = serviceConfig ? { "grpc.service_config": serviceConfig } : {};
const client = new InferenceService(address, grpc.credentials.createInsecure(), options);
const deadline = () => ({ deadline: Date.now() + 60_000 });
const print = (value) => console.log(JSON.stringify(value));
const printError = (error) =>
  print({ error: { code: grpc.status[error.code], message: error.details } });

if (method === "generate" || method === "cancel") {
  const stream = client.generate(JSON.parse(request), deadline());
  stream.on("data", (message) => {
    print(message);
    if (method === "cancel" && message.event === "delta") stream.cancel();
  });
  stream.on("error", printError);
  stream.on("close", () => client.close());
} else {
  client[method](JSON.parse(request), deadline(), (error, response) => {
    if (error) printError(error);
    else print(response);
    client.close();
  });
}
